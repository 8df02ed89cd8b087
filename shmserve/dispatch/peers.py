"""The executors this frontend process knows, and which of them a request goes to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from shmserve.core.registry import LiveInstance, ModelEntry, Snapshot
from shmserve.dispatch.affinity import Affinity
from shmserve.dispatch.executor_pool import Lane, Peer
from shmserve.errors import PeerDied, QueueFull, ShmserveError, Unavailable
from shmserve.protocol.control.data_messages import Execute

log = logging.getLogger(__name__)


class Peers:
    """Met when first needed, forgotten when the registry names them no more. Any thread.

    Args:
        run_dir: where executors have their endpoints.
        snapshot: the registry as of this moment; raises Unavailable.
        make: a peer of an instance at a path.
    """

    def __init__(
        self,
        run_dir: str,
        snapshot: Callable[[], Snapshot],
        make: Callable[[LiveInstance, str], Peer],
    ) -> None:
        self._run_dir = run_dir
        self._snapshot = snapshot
        self._make = make
        self._affinity = Affinity()
        self._lock = threading.Lock()
        self._departed: list[Peer] = []  # they may still hold something of ours
        self._pruned_at = -1
        self.by_process: dict[str, Peer] = {}

    def lane(self, entry: ModelEntry, tried: set[str], message: Execute) -> tuple[Peer, Lane]:
        """A lane to the least loaded instance that is not in `tried`, on the GPU that has the
        request's memory if there is one.

        Raises:
            Unavailable: no instance takes requests now.
            QueueFull: all that do have full queues.
        """
        full: QueueFull | None = None
        candidates = [self._peer(i) for i in entry.instances if i.process not in tried]
        if len(candidates) > 1:
            candidates.sort(key=lambda peer: peer.load)
            near = self._affinity.device(self._snapshot(), message)
            if near:
                candidates.sort(key=lambda peer: peer.instance.device != near)
        for peer in candidates:
            try:
                return peer, peer.acquire()
            except QueueFull as ex:
                full = ex
            except PeerDied:
                tried.add(peer.instance.process)
                self.departed(peer)
        if full is not None:
            raise full
        raise Unavailable(
            f"no executor of model '{entry.spec.name}' is running now; it is being restarted"
        )

    def lost(self, peer: Peer, ex: ShmserveError) -> None:
        """A peer's channel failed: what it held comes back; a live one is met again later."""
        log.warning("executor %s lost: %s", peer.instance.process, ex)
        with self._lock:
            if self.by_process.get(peer.instance.process) is peer:
                del self.by_process[peer.instance.process]
        peer.close()

    def departed(self, peer: Peer) -> None:
        """A peer takes no more requests: it is ending, but may be working on earlier ones."""
        with self._lock:
            if self.by_process.get(peer.instance.process) is peer:
                del self.by_process[peer.instance.process]
                self._departed.append(peer)

    def flush(self) -> None:
        """Tell each what it has not been told yet."""
        for peer in list(self.by_process.values()):
            peer.flush()

    def prune(self) -> None:
        """Forget executors that the registry does not name any more."""
        with self._lock:
            over = [peer for peer in self._departed if peer.over]
            self._departed = [peer for peer in self._departed if peer not in over]
        for peer in over:
            peer.close()
        try:
            snapshot = self._snapshot()
        except Unavailable:
            return
        if snapshot.generation == self._pruned_at:
            return
        self._pruned_at = snapshot.generation
        live = {
            instance.process
            for versions in snapshot.models.values()
            for entry in versions.values()
            for instance in entry.instances
        }
        with self._lock:
            gone = [p for name, p in self.by_process.items() if name not in live]
            for peer in gone:
                del self.by_process[peer.instance.process]
            self._departed += gone

    def rows(self) -> list[dict[str, Any]]:
        """For `shmserve show queues`."""
        return [
            {"instance": peer.instance.name, "in_flight": peer.in_flight}
            for peer in list(self.by_process.values())
        ]

    def close(self) -> None:
        """Let go of all of them; calls still open end with errors."""
        with self._lock:
            peers = [*self.by_process.values(), *self._departed]
            self.by_process, self._departed = {}, []
        for peer in peers:
            peer.close()

    def _peer(self, instance: LiveInstance) -> Peer:
        peer = self.by_process.get(instance.process)
        if peer is None:
            path = os.path.join(self._run_dir, instance.endpoint)
            with self._lock:
                peer = self.by_process.setdefault(instance.process, self._make(instance, path))
        return peer
