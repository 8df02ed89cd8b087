"""Dispatcher: a frontend process's arena, executors and view of the registry."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from shmserve import config, ids
from shmserve.config import Settings
from shmserve.core.live_settings import initial
from shmserve.core.registry import LiveInstance, ModelEntry, Snapshot, require_ready
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.failure_reasons import reason_of
from shmserve.core.stats.request_counters import MAX_COUNTED
from shmserve.dispatch.cache.response_cache import ResponseCache
from shmserve.dispatch.caller_shares import CallerShares
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.calls.data_plane import DataPlane
from shmserve.dispatch.calls.request_counting import RequestCounting, message_of
from shmserve.dispatch.ensembles.ensemble_call import EnsembleCall, EnsemblePlane
from shmserve.dispatch.ensembles.step_threads import StepThreads
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import NO_OPTIONS, RunOptions
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.dispatch.pool.load_balancer import LoadBalancer, RequestBounds
from shmserve.dispatch.pool.orphaned_requests import OrphanedRequests
from shmserve.dispatch.pool.rest import Rest
from shmserve.dispatch.process.coordinator_client import CoordinatorClient
from shmserve.dispatch.traces.tracing import Tracer
from shmserve.errors import ArenaExhausted, NotFound, ShmserveError, Unavailable
from shmserve.observe import flight_recorder, gauges
from shmserve.protocol.control.link_messages import RegistryChanged, Welcome
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.settings_messages import FlagSet, SetFlag
from shmserve.protocol.control.span_messages import Attribute
from shmserve.protocol.control.stats_messages import CounterPage, RequestFailed
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport import rundir
from shmserve.transport.link import Link, LinkHandlers

log = logging.getLogger(__name__)

_MAINTENANCE_S = 1.0
STEP_THREADS = 64  # for parallel steps of ensembles
_RESTING_S = 5.0  # without requests, and with no slots held
_STARTING_S = 0.05  # until the first segment exists


class Dispatcher:
    """The dispatcher of a process. Start after fork. `settle` is called about once a second while
    requests come."""

    def __init__(
        self, settings: Settings, role: str = "http", settle: Callable[[], None] = lambda: None
    ) -> None:
        self.settings = settings
        self.process = ids.new_process_id(role, os.getpid())
        run_dir = config.run_dir(settings)
        self._registry = RegistryReader(run_dir)
        self._link = Link(
            run_dir,
            role,
            self.process,
            LinkHandlers(
                on_trim=self._trim,
                on_stats=self._stats,
                held_bytes=lambda: self.memory.held_bytes,
                on_message=self._on_message,
            ),
        )
        self.counting = RequestCounting(rundir.read_epoch(run_dir), MAX_COUNTED)
        self.tracer = Tracer(self.process, role, settings)
        self.memory = ForwardingMemory(self._link, self._epoch, self._link.arena_bytes)
        self.shares = CallerShares(settings, lambda: self._link.pool_bytes)
        self.coordinator = CoordinatorClient(self._link, self.process, settings)
        self.orphans = OrphanedRequests(self.memory)
        self.rest = Rest(self.orphans.wake)
        # A model that calls models is a single caller, so no share need be kept free.
        share = 1.0 if role == "model" else settings.max_caller_share
        bounds = RequestBounds(
            settings.max_queue, settings.max_model_requests, share, settings.restart_wait_s
        )
        self.executors = LoadBalancer(run_dir, self._registry, self.orphans, self._pool, bounds)
        self._plane = DataPlane(
            self.memory,
            self.executors,
            self.counting,
            self.tracer,
            settings,
            itertools.count(1).__next__,
        )
        self._settle = settle
        self._cache: ResponseCache | None = None
        if settings.response_cache_bytes:
            self._cache = ResponseCache(self.memory, settings.response_cache_bytes)
            self.memory.spare = self._cache.evict
        threads = StepThreads(STEP_THREADS)
        self._ensembles = EnsemblePlane(self._plane, threads, self._cache)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._maintain, name="maintenance", daemon=True)

    def start(self) -> None:
        """Connect in the background. Never blocks."""
        settings = self.settings
        flight_recorder.start(config.run_dir(settings), self.process)
        self._link.start()
        self._thread.start()

    def close(self) -> None:
        """Release everything. Open calls end with errors."""
        self._stopping.set()
        self.orphans.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _MAINTENANCE_S)
        self.rest.call_off()
        self.tracer.flush(self.coordinator.take_traces)
        self.tracer.close()
        self.orphans.close()
        self.executors.close()
        self._link.close()
        self.memory.close()
        self.counting.close()

    # ------------------------------------------------------------- registry

    def snapshot(self) -> Snapshot:
        """Return the current registry.

        Raises:
            Unavailable: nothing has been published yet.
        """
        return self._registry.current()

    def model(self, name: str, version: str = "") -> ModelEntry:
        """Return the entry of a model, in any state. Without a version, return the newest ready
        version.

        Raises:
            NotFound: the model or the version does not exist.
        """
        return self._registry.current().model(name, version)

    def ready_model(self, name: str, version: str = "") -> ModelEntry:
        """Return the entry of a ready model.

        Raises:
            NotFound: as `model`, or no version can be used.
            Unavailable: the version is not ready (now).
        """
        snapshot = self._registry.current()
        entry = snapshot.ready_entries.get((name, version))
        if entry is not None:
            return entry
        try:
            return require_ready(snapshot.model(name, version), version)
        except NotFound:  # the client chose the name, so keep it out of the recorder
            flight_recorder.record("request refused", "unknown model")
            raise

    # ------------------------------------------------------------- requests

    def call(
        self, entry: ModelEntry, options: RunOptions = NO_OPTIONS, cancellable: bool = False
    ) -> InferenceCall:
        """Return a new request for a model version. Close the request on every path."""
        self.rest.called = True
        if self.rest.resting:
            self.rest.end()
        if self._cache is not None and entry.spec.caches_answers:
            return self._ensembles.call(entry, options, cancellable)
        if entry.spec.steps:
            return EnsembleCall(self._ensembles, entry, options)
        return Call(self._plane, entry, options, cancellable)

    def _pool(self, instance: LiveInstance, path: str) -> ExecutorPool:
        limit = self.settings.max_queue
        return ExecutorPool(instance, path, self.process, self.memory, limit, self.rest)

    def set_flag(self, name: str, value: bool) -> None:
        """Change a flag of an extension, for all processes."""
        self.coordinator.ask(lambda ticket, _: SetFlag(ticket, name, value), FlagSet)

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        """Count a request for this version that failed before a call existed."""
        self.counting.ended(entry, reason_of(error), told=message_of(error))

    def trace_refused(
        self, error: ShmserveError, traceparent: str, attributes: dict[str, Attribute]
    ) -> None:
        """Trace a request that ended with an error before reaching an executor, by the trace
        settings for all models. Requests sent to an executor are ignored, because they are
        traced already."""
        if error.was_sent:
            return
        try:
            tuning = self._registry.current().tuning
        except Unavailable:
            tuning = None
        trace = (tuning or initial(self.settings)).trace
        self.tracer.refused(error, traceparent, attributes, trace)

    def count_key(self, name: str) -> None:
        """Count a request with the key of this name."""
        self.counting.keyed(name)

    # ---------------------------------------------------------- maintenance

    def _epoch(self) -> str:
        return self.snapshot().epoch

    def _maintain(self) -> None:
        prepared, pause_s = False, _MAINTENANCE_S
        while not self._stopping.is_set():
            try:
                prepared = prepared or self._prepare()
                self.orphans.poll(pause_s if prepared else _STARTING_S)
                called = self.rest.over()
                self._settle()
                if self._cache is not None:
                    self._cache.grow()
                self.executors.flush()
                self.executors.prune()
                self.memory.trim(self.settings.segment_idle_s)
                self._tell()
                self.rest.begin()  # before the last look for work
                if self._measure() or called or self.rest.called:
                    self.rest.call_off()
                pause_s = _RESTING_S if self.rest.resting else _MAINTENANCE_S
                self.tracer.flush(self.coordinator.take_traces)
            except Exception:
                log.exception("one round of maintenance failed")
                pause_s = _MAINTENANCE_S
                time.sleep(_MAINTENANCE_S)

    def _tell(self) -> None:
        """Report error texts sent to clients, for the operators of the server."""
        if self._link.connected:
            for (model, version, reason), text in self.counting.told().items():
                self._link.send(RequestFailed(model, version, reason, text))

    def _prepare(self) -> bool:
        try:
            self.memory.prepare()
        except (ArenaExhausted, Unavailable) as ex:
            log.debug("no arena yet: %s", ex)
            return False
        return True

    def _measure(self) -> bool:
        """Publish gauges. Return True if work remains without another call: our slots are in use,
        segments may be given back, executors have our requests, or releases wait for executors."""
        stats, in_flight = self.memory.stats(), self.executors.in_flight()
        self.counting.measure(
            Gauges(
                stats.slots - stats.free,
                stats.used_bytes,
                stats.segment_bytes,
                gauges.connections(),
                len(self.orphans),
                self._cache.nbytes if self._cache is not None else 0,
            ),
            in_flight,
        )
        held = stats.slots > stats.free or self.memory.may_shrink
        return held or bool(in_flight) or len(self.orphans) > 0 or self.executors.has_releases

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, RegistryChanged):
            self._registry.changed()
        elif isinstance(message, Welcome):  # a new coordinator does not know our counter page
            fd = self.counting.page.reader_fd()
            if fd is not None:
                self._link.send(CounterPage(self.counting.page.nbytes), [fd])
                os.close(fd)

    def _cache_rows(self) -> list[dict[str, Any]]:
        """Return cached answers, bytes, hits and misses by model version."""
        if self._cache is None:
            return []
        kept, found = self._cache.by_model(), self.counting.lookups()
        return [
            {
                "model": model,
                "version": version,
                "answers": kept[model, version][0],
                "bytes": kept[model, version][1],
                "hits": found[model, version][0],
                "misses": found[model, version][1],
            }
            for model, version in sorted(kept.keys() | found.keys())
        ]

    def _trim(self, nbytes: int) -> None:
        if self._cache is not None:
            self._cache.evict(nbytes)
        self.memory.trim(0.0, nbytes)

    def _stats(self, what: str) -> dict[str, Any]:
        if what == "queues":
            return {"queues": self.executors.rows()}
        if what == "cache":
            return {"cache": self._cache_rows()}
        arena = self.memory.stats()
        return {
            "abandoned": len(self.orphans),
            "arena": {name: getattr(arena, name) for name in arena.__struct_fields__},
            what: self.memory.rows(what),
        }
