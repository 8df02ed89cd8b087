"""Load balancer: knows the executors of this frontend process, and chooses an executor for each
request.

The load balancer reads the registry again before sending, because the instances of the version may
have changed while the request's body arrived.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET, Struct, field

from shmserve import errors, ids
from shmserve.core.registry import LiveInstance, ModelEntry, Snapshot
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.dispatch.pool.orphaned_requests import OrphanedRequests
from shmserve.dispatch.pool.sequence_placement import BegunSequences, home_of, where_to_begin
from shmserve.protocol.control.data_messages import Execute, RegionRef
from shmserve.shm.registry_page import RegistryReader
from shmserve.shm.status_page import StatusView
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)


class RequestBounds(Struct, frozen=True):
    """Limits on requests.

    Attributes:
        instance: most requests at one instance.
        model: most requests at all instances of a model version.
        caller_share: share of these limits for one caller, from 0 to 1.
        restart_wait_s: longest wait for an executor that is being started, in seconds.
    """

    instance: int
    model: int
    caller_share: float = 1.0
    restart_wait_s: float = 0.0


class LoadBalancer(Struct, eq=False):
    """Executor pools, made on first use and dropped once the registry no longer names the
    executor. Thread-safe.

    Attributes:
        _run_dir: directory with the endpoints of executors.
        orphans: keeper of connections with orphaned requests.
        _make: makes the pool of an instance at a path.
        _bounds: limits on requests.
    """

    _run_dir: str
    registry: RegistryReader
    orphans: OrphanedRequests
    _make: Callable[[LiveInstance, str], ExecutorPool]
    _bounds: RequestBounds
    pools: dict[str, ExecutorPool] = {}  # by the executor's process
    # requests that wait for a restart, by model and caller
    _waiting: Counter[tuple[str, int]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _departed: list[ExecutorPool] = []  # executors may still hold slots of ours
    _pruned_at: int = -1
    _begun: BegunSequences = field(default_factory=BegunSequences)
    _devices: tuple[Snapshot | None, dict[int, str]] = (None, {})

    def connect(
        self, entry: ModelEntry, tried: set[str], message: Execute
    ) -> tuple[ExecutorPool, ExecutorConnection, ModelEntry]:
        """Return a connection to the least loaded instance not in `tried`, and the current entry
        of the version. Instances on the GPU with the request's memory come first.

        Raises:
            QueueFull: all queues of instances are full, the model's limit is reached, or the
                caller's share is used up.
            NoExecutor: no instance takes requests now.
            Unavailable, NotFound: the version is no longer served, or now takes different requests
                than `entry`, against which this request was checked.
        """
        snapshot = self.registry.current()
        if snapshot.ready_entries.get((entry.spec.name, entry.spec.version)) is not entry:
            entry = snapshot.latest(entry)
        while True:  # each turn but the last has tried another executor
            full: errors.QueueFull | None = None
            pools = [
                self.pools.get(instance.process) or self._meet(instance)
                for instance in entry.instances
                if instance.process not in tried
            ]
            in_flight = sum([pool.in_flight for pool in pools])
            if in_flight and message.caller_number and self._bounds.caller_share < 1:
                self._check_share(entry.spec.name, pools, message.caller_number)
            if in_flight >= self._bounds.model:
                raise errors.QueueFull(
                    f"model '{entry.spec.name}' has {self._bounds.model} requests that wait or run"
                    " already (max_model_requests)"
                )
            of_sequence = len(pools) > 1 and entry.spec.config.sequence_batching is not UNSET
            if of_sequence:
                pools = self._by_sequence(entry.spec, pools, message, tried)
            elif len(pools) > 1:
                pools.sort(key=lambda pool: pool.load)
                near = self._device(snapshot, message)
                if near:
                    pools.sort(key=lambda pool: pool.instance.device != near)
            for pool in pools:
                try:
                    connection = pool.acquire(message.caller_number)
                except errors.QueueFull as ex:
                    full = ex
                except errors.PeerDied:
                    tried.add(pool.instance.process)
                    self.departed(pool)
                else:
                    if of_sequence:
                        with self._lock:
                            self._begun.sent(entry.spec, message, pool)
                    return pool, connection, entry
            if full is not None:
                raise full
            snapshot = self.registry.current()
            # the known executors have ended: look for successors
            entry = snapshot.refreshed(entry)
            if all(instance.process in tried for instance in entry.instances):
                raise errors.NoExecutor(
                    f"no executor of model '{entry.spec.name}' is running now;"
                    " it is being restarted"
                )

    def restart_wait_s(self) -> float:
        """Return how long to wait for an executor that is being started, in seconds."""
        return 0.0 if self.registry.current().draining else self._bounds.restart_wait_s

    @contextmanager
    def waiting(self, entry: ModelEntry, caller: int) -> Iterator[None]:
        """Count a request that waits for an executor being started. Raise QueueFull if too many
        requests wait already, in total or for this caller."""
        name, limit = entry.spec.name, self._bounds.model
        share = limit * self._bounds.caller_share if caller else limit
        with self._lock:
            total = sum(count for (model, _), count in self._waiting.items() if model == name)
            if total >= limit or self._waiting[name, caller] >= share:
                raise errors.QueueFull(f"too many requests wait for a restart of model '{name}'")
            self._waiting[name, caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[name, caller] -= 1
                if not self._waiting[name, caller]:
                    del self._waiting[name, caller]

    def _check_share(self, model: str, pools: list[ExecutorPool], caller: int) -> None:
        """Raise QueueFull if the caller's requests in the pools have used up the caller's share."""
        bounds = self._bounds
        limit = min(bounds.model, bounds.instance * len(pools))
        has = sum([pool.by_caller.get(caller, 0) for pool in pools])
        if has and has >= limit * bounds.caller_share:
            raise errors.QueueFull(
                f"this caller has {has} requests for model '{model}', its share of the {limit}"
                " that may wait or run (max_caller_share)"
            )

    def _by_sequence(
        self, spec: ModelSpec, pools: list[ExecutorPool], message: Execute, tried: set[str]
    ) -> list[ExecutorPool]:
        """Return the only executor where the request's sequence lives. For a new sequence, return
        the executors ordered by free slots. An executor's first hello is awaited only if no
        other executor has the sequence."""
        sequence = message.sequence
        home = home_of(((pool, pool.known_status) for pool in pools), sequence)
        if home is not None:
            return [home]
        views: list[tuple[ExecutorPool, StatusView | None]] = []
        for pool in pools:
            try:
                views.append((pool, pool.status()))
            except errors.QueueFull:
                views.append((pool, None))
            except (errors.PeerDied, errors.ProtocolViolation):
                tried.add(pool.instance.process)
                self.departed(pool)
        home = home_of(views, sequence)
        if home is None:
            with self._lock:
                home = self._begun.home(spec, message, (pool for pool, _ in views))
        return where_to_begin(views, sequence) if home is None else [home]

    def _meet(self, instance: LiveInstance) -> ExecutorPool:
        """Return the pool of an executor: a pool set aside earlier, or a new pool."""
        path = os.path.join(self._run_dir, instance.endpoint)
        with self._lock:
            for pool in self._departed:
                if pool.instance.process == instance.process:
                    self._departed.remove(pool)
                    return self.pools.setdefault(instance.process, pool)
            return self.pools.setdefault(instance.process, self._make(instance, path))

    def _device(self, snapshot: Snapshot, message: Execute) -> str:
        """Return the device, such as ``cuda:0``, with most bytes of the request's CUDA regions,
        because an instance there needs no copy. Return "" if the request has no CUDA region."""
        known, devices = self._devices
        if known is not snapshot:  # computed once for each snapshot
            regions = snapshot.regions.values()
            devices = {r.number: on for r in regions if (on := r.on_device)}
            self._devices = (snapshot, devices)
        if not devices:
            return ""
        inputs = [t.at for t in message.inputs if isinstance(t.at, RegionRef)]
        nbytes: Counter[str] = Counter()
        for at in [*inputs, *(place.at for place in message.places)]:
            if at.region in devices:
                nbytes[devices[at.region]] += at.nbytes
        return max(nbytes, key=nbytes.__getitem__, default="")

    def lost(self, pool: ExecutorPool, ex: errors.ShmserveError) -> None:
        """Set aside an executor whose channel failed. A living executor, such as one that lacked
        memory, gets further requests later."""
        log.warning("executor %s lost: %s", pool.instance.process, ex)
        self.departed(pool)

    def departed(self, pool: ExecutorPool) -> None:
        """Set aside an executor that takes no more requests. The executor may still work on earlier
        requests. `prune` takes back the slots of an executor that has ended."""
        with self._lock:
            if self.pools.get(pool.instance.process) is pool:
                del self.pools[pool.instance.process]
                self._departed.append(pool)

    def flush(self) -> None:
        """Send waiting releases to all executors."""
        for pool in self._all():
            pool.flush()

    @property
    def has_releases(self) -> bool:
        """True if slots wait for release at an executor."""
        return any(pool.has_releases for pool in self._all())

    def prune(self) -> None:
        """Set aside executors that the registry no longer names, and close finished pools."""
        with self._lock:
            over = [pool for pool in self._departed if pool.over]
            self._departed = [pool for pool in self._departed if pool not in over]
        for pool in over:
            pool.close()
        try:
            snapshot = self.registry.current()
        except errors.Unavailable:
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
            gone = [pool for name, pool in self.pools.items() if name not in live]
            for pool in gone:
                del self.pools[pool.instance.process]
            self._departed += gone

    def in_flight(self) -> Counter[tuple[str, str]]:
        """Return the number of our requests at executors, by model version."""
        counts: Counter[tuple[str, str]] = Counter()
        for pool in self._all():
            if pool.in_flight:
                counts[ids.instance_model(pool.instance.name)] += pool.in_flight
        return counts

    def _all(self) -> list[ExecutorPool]:
        with self._lock:
            return [*self.pools.values(), *self._departed]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows for `shmserve show queues`."""
        return [
            {"instance": pool.instance.name, "in_flight": pool.in_flight}
            for pool in list(self.pools.values())
        ]

    def close(self) -> None:
        """Close all pools. Open calls end with errors."""
        with self._lock:
            pools = [*self.pools.values(), *self._departed]
            self.pools, self._departed = {}, []
        for pool in pools:
            pool.close()
