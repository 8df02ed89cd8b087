"""What a frontend process has one of: its arena, its peers, its view of the registry."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from shmserve import config, ids
from shmserve.config import Settings
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.core.stats.counter_pages import Gauges
from shmserve.dispatch.call import Call
from shmserve.dispatch.executor_pool import Peer
from shmserve.dispatch.forwarded_outputs import RelayMemory
from shmserve.dispatch.models import ModelDesk
from shmserve.dispatch.online import set_online
from shmserve.dispatch.orphaned_requests import Abandoned
from shmserve.dispatch.peers import Peers
from shmserve.dispatch.pipeline import PLATFORM, PipelineCall, Pipelines
from shmserve.dispatch.regions import RegionDesk
from shmserve.dispatch.request_counting import Counting, reason_of
from shmserve.dispatch.server_desk import ServerDesk
from shmserve.dispatch.tracing import Tracer
from shmserve.errors import (
    ArenaExhausted,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from shmserve.observe import gauges
from shmserve.protocol.control.link_messages import Welcome
from shmserve.protocol.control.stats_messages import CounterPage
from shmserve.protocol.messages import FromCoordinator
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport import rundir
from shmserve.transport.link import Link

log = logging.getLogger(__name__)

_MAINTENANCE_S = 1.0
_STARTING_S = 0.05  # until the first segment is there


class Dispatcher:
    """Start it after fork; one per process."""

    def __init__(self, settings: Settings, role: str = "http") -> None:
        self.settings = settings
        self.process = ids.new_process_id(role, os.getpid())
        self.numbers = ids.RequestNumbers()
        self._run_dir = config.run_dir(settings)
        self._registry = RegistryReader(self._run_dir)
        self.memory: RelayMemory
        self._link = Link(
            self._run_dir,
            role,
            self.process,
            on_trim=self._trim,
            on_stats=self._stats,
            held_bytes=lambda: self.memory.held_bytes,
            on_message=self._on_message,
        )
        epoch = rundir.read_epoch(self._run_dir)
        self.counting = Counting(epoch, settings.max_counted_models)
        self.tracer = Tracer(self.process, role)
        self.server = ServerDesk(self._link)
        self.memory = RelayMemory(self._link, self._epoch, self._link.arena_bytes)
        self.pipelines = Pipelines(self, settings.grps_pipelines)
        self.regions = RegionDesk(self._link)
        self.models = ModelDesk(self._link, self.process, settings)
        self.abandoned = Abandoned(self.memory)
        self.peers = Peers(self._run_dir, self.snapshot, self._peer)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._maintain, name="maintenance", daemon=True)

    def start(self) -> None:
        """Connect in the background; never blocks."""
        self._link.start()
        self._thread.start()

    def close(self) -> None:
        """Let go of everything; calls still open end with errors."""
        self._stopping.set()
        self.abandoned.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _MAINTENANCE_S)
        self.abandoned.close()
        self.peers.close()
        self._link.close()
        self.memory.close()
        self.counting.close()

    # ------------------------------------------------------------- registry

    def snapshot(self) -> Snapshot:
        """The registry as of this moment.

        Raises:
            Unavailable: nothing was published yet.
        """
        return self._registry.current()

    def model(self, name: str, version: str = "") -> ModelEntry:
        """The entry of a model, in any state; without a version the newest that is ready.

        Raises:
            NotFound: no such model, or no such version of it.
        """
        snapshot = self.snapshot()
        versions = snapshot.models.get(name)
        if not versions and name in self.pipelines and version in ("", "1"):
            return self.pipelines.entry(name)
        if not versions:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if not version:
            entry = snapshot.newest(name)
            assert entry is not None
            return entry
        found = versions.get(version)
        if found is None:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return found

    def ready_model(self, name: str, version: str = "") -> ModelEntry:
        """As `model`, for use.

        Raises:
            NotFound: as `model`, or no version of it can be used.
            Unavailable: the version is not ready (now).
        """
        entry = self.model(name, version)
        if entry.state is not ModelState.READY:
            if not version and entry.state is not ModelState.LOADING:
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise Unavailable(
                f"Request for unknown model: '{name}' version {entry.spec.version} "
                "is not at ready state"
            )
        return entry

    def refreshed(self, entry: ModelEntry) -> ModelEntry:
        """The same version as it is now.

        Raises:
            NotFound, Unavailable: it is served no more, or as something that takes other
                requests than this one, which was checked against `entry`.
        """
        found = self.ready_model(entry.spec.name, entry.spec.version)
        if not found.spec.takes_the_same(entry.spec):
            raise Unavailable(
                f"model '{entry.spec.name}' has been replaced by one with other inputs or outputs"
            )
        return found

    def latest(self, entry: ModelEntry) -> ModelEntry:
        """The same version as it is now, or `entry` while that may still be served."""
        found = self.snapshot().models.get(entry.spec.name, {}).get(entry.spec.version)
        if found is entry or found is None or not found.instances:
            return entry
        return found if found.spec.takes_the_same(entry.spec) else entry

    # ------------------------------------------------------------- requests

    def call(
        self, entry: ModelEntry, timeout_s: float | None = None, cancellable: bool = False
    ) -> Call | PipelineCall:
        """A new request for a model version, or a pipeline; close it on every path."""
        timeout_s = timeout_s or self.settings.request_timeout_s
        if entry.spec.platform == PLATFORM:
            steps = self.pipelines.steps(entry.spec.name)
            return PipelineCall(self, steps, timeout_s, cancellable)
        return Call(self, entry, timeout_s, cancellable)

    def _peer(self, instance: LiveInstance, path: str) -> Peer:
        return Peer(
            instance,
            path,
            self.process,
            self.memory,
            self.settings.max_queue,
            keep=bool(self.settings.grps_pipelines),
        )

    def explain(self, regions: set[int], wait_s: float) -> None:
        """An executor died of a request with these regions: say so if it was their fault.

        Raises:
            InvalidArgument: one of them is in quarantine (now).
        """
        deadline = time.monotonic() + wait_s
        while True:
            for region in self.snapshot().regions.values():
                if region.number in regions and region.quarantined:
                    raise InvalidArgument(
                        f"the executor died on shared memory region '{region.name}':"
                        f" {region.quarantined}"
                    )
            if time.monotonic() >= deadline:
                return
            time.sleep(0.02)

    def set_online(self, online: bool) -> None:
        """Change GRPS's online flag, for all processes."""
        set_online(self._link, online)

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        """A request for this version failed before there was a call for it: count that."""
        self.counting.failed(entry, reason_of(error))

    # ---------------------------------------------------------- maintenance

    def _epoch(self) -> str:
        return self.snapshot().epoch

    def _maintain(self) -> None:
        prepared = False
        while not self._stopping.is_set():
            try:
                prepared = prepared or self._prepare()
                self.abandoned.poll(_MAINTENANCE_S if prepared else _STARTING_S)
                self.peers.flush()
                self.peers.prune()
                self.memory.trim(self.settings.segment_idle_s)
                self._measure()
                self.tracer.flush(self.server.take_traces)
            except Exception:
                log.exception("maintenance failed; it goes on")
                time.sleep(_MAINTENANCE_S)

    def _prepare(self) -> bool:
        try:
            self.memory.prepare()
        except (ArenaExhausted, Unavailable) as ex:
            log.debug("no arena yet: %s", ex)
            return False
        return True

    def _measure(self) -> None:
        stats = self.memory.stats()
        self.counting.measure(
            Gauges(
                stats.slots - stats.free,
                stats.used_bytes,
                stats.segment_bytes,
                gauges.connections(),
                len(self.abandoned),
            )
        )

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, Welcome):  # a coordinator that does not know our page
            fd = self.counting.page.reader_fd()
            if fd is not None:
                self._link.send(CounterPage(self.counting.page.nbytes), [fd])
                os.close(fd)

    def _trim(self, nbytes: int) -> None:
        self.memory.trim(0.0, nbytes)

    def _stats(self, what: str) -> dict[str, Any]:
        if what == "queues":
            return {"queues": self.peers.rows()}
        arena = self.memory.stats()
        return {
            "abandoned": len(self.abandoned),
            "arena": {name: getattr(arena, name) for name in arena.__struct_fields__},
            what: self.memory.rows(what),
        }
