"""Assembly of one coordinator: makes the parts, then starts from the repository or resumes from a
checkpoint."""

import logging
import os
import time

from msgspec import Struct

from shmserve import model_places
from shmserve.config import Settings
from shmserve.coordinator.models import desired_models
from shmserve.coordinator.models.desired_models import DesiredModels, Library
from shmserve.coordinator.models.model_control import ModelControl
from shmserve.coordinator.models.repository_jobs import Background, RepositoryJobs
from shmserve.coordinator.models.supervisor_sync import Send, SupervisorSync
from shmserve.coordinator.programs.lane_desk import LaneDesk
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.coordinator.resource_turns import RECONNECT_S, ResourceTurns
from shmserve.coordinator.state.checkpoint import Checkpoint, CheckpointFile
from shmserve.coordinator.state.publication import EffectRunner, Publication
from shmserve.coordinator.state.runtime_settings import RuntimeSettingsStore
from shmserve.coordinator.stats.admin_tables import OwnProcess
from shmserve.coordinator.stats.counter_totals import SETTLE_S, CounterTotals
from shmserve.coordinator.stats.introspection import Introspection
from shmserve.coordinator.stats.memory_watch import MemoryWatch
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.coordinator.stats.stats_sources import StatsSources
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import Revision, VersionRecord
from shmserve.core.control.rollout import Rollouts
from shmserve.core.control.watchdog import Watchdog
from shmserve.core.effects import Effect
from shmserve.core.memory.budget import Ledger
from shmserve.core.registry import Snapshot
from shmserve.core.scheduling.rate_limit_policy import amounts
from shmserve.core.scheduling.rate_limiter import RateLimiter
from shmserve.core.stats.request_counters import MAX_COUNTED
from shmserve.errors import ConfigError
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder, gpus
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol.control.model_messages import ModelsFetched
from shmserve.shm.registry_page import RegistryWriter

_log = logging.getLogger(__name__)

_LEDGER_SETTLE_S = 0.2  # after a restart: holders report their bytes before new grants


class Launch(Struct, frozen=True):
    """Arguments from the supervisor. `master_fd`: pidfd of the gunicorn master. `grpc_unserved`:
    reason why no gRPC process serves, empty if one serves or no gRPC process is needed."""

    settings: Settings
    run_dir: str
    process: str
    epoch: str
    master_fd: int
    grpc_unserved: str = ""


class Outside(Struct, frozen=True):
    """Access of the parts to everything beyond the coordinator's own state. `send` never blocks and
    never fails; `jobs` run in another thread."""

    writer: RegistryWriter
    checkpoint: CheckpointFile
    owners: Owners
    jobs: RepositoryJobs
    gpus: GpuUse
    send: Send


class Parts(Struct, frozen=True):
    """Parts of the coordinator, which take messages and time and make decisions."""

    reconciler: Reconciler
    regions: RegionRegistrations
    introspection: Introspection
    runtime_settings: RuntimeSettingsStore
    sync: SupervisorSync
    publication: Publication
    effects: EffectRunner
    control: ModelControl
    watchdog: Watchdog
    memory: MemoryWatch
    lanes: LaneDesk
    turns: ResourceTurns


def assemble(
    launch: Launch, outside: Outside, pool_bytes: int, arena_bytes: int, shortage: str
) -> Parts:
    """Return the parts. `arena_bytes`: first segment of each process with an arena, in bytes."""
    settings, send, now = launch.settings, outside.send, time.monotonic()
    restarted = outside.writer.previous is not None
    ledger = Ledger(pool_bytes, arena_bytes, now + _LEDGER_SETTLE_S if restarted else 0.0)
    limits_s = settings.execute_timeout_s, settings.load_timeout_s
    steps = {step.partition("/")[0] for steps in settings.pipelines.values() for step in steps}
    models = Rollouts(settings.load_timeout_s, settings.request_timeout_s, steps)
    reconciler = Reconciler(ledger, *limits_s, shortage=shortage, models=models)
    limiter = RateLimiter(amounts(settings.rate_limit_resources), is_open=not restarted)
    regions = RegionRegistrations(
        *(settings, launch.run_dir, reconciler, send, outside.owners),
        devices=lambda: len(gpus.visible_devices()),
    )
    runtime_settings = RuntimeSettingsStore(settings, send)
    sync = SupervisorSync(reconciler, send)
    publication = Publication(
        *(outside.writer, reconciler, regions, runtime_settings),
        *(settings.flags(), settings.pipelines, send, settings.ready_requires),
    )
    effects = EffectRunner(
        reconciler, outside.checkpoint, publication, sync, outside.jobs, send, launch.run_dir
    )
    introspection = _introspection(launch, outside, reconciler, regions, limiter, now)
    return Parts(
        reconciler,
        regions,
        introspection,
        runtime_settings,
        sync,
        publication,
        effects,
        ModelControl(settings, reconciler, outside.jobs, sync, send, effects.perform),
        Watchdog(settings.execute_timeout_s),
        MemoryWatch(reconciler, introspection.counters.reading),
        LaneDesk(settings, publication, send),
        ResourceTurns(limiter, send, now + RECONNECT_S),
    )


def _introspection(
    launch: Launch,
    outside: Outside,
    reconciler: Reconciler,
    regions: RegionRegistrations,
    limiter: RateLimiter,
    now: float,
) -> Introspection:
    restarted, limit = outside.writer.previous is not None, MAX_COUNTED
    settled_at = now + SETTLE_S if restarted else 0.0
    counters = CounterTotals(launch.run_dir, launch.epoch, outside.send, limit, settled_at)
    sources = StatsSources(reconciler, regions.book, counters, outside.gpus, limiter)
    monitoring = None
    if launch.settings.dashboard:
        monitoring = Monitoring(sources, outside.send, launch.epoch, limit, restarted, now)
        flight_recorder.follow(monitoring.incidents.take)
    own = OwnProcess(launch.process, os.getpid(), now)
    return Introspection(sources, monitoring, outside.send, own)


def begin(parts: Parts, desired: DesiredModels, fingerprints: dict[str, str]) -> None:
    """Serve the models of the repository's first scan."""
    effects: list[Effect] = []
    now = time.monotonic()
    by_model: dict[str, list[VersionRecord]] = {}
    for spec, instances in desired.versions:
        by_model.setdefault(spec.name, []).append(parts.sync.version(spec, instances, 1))
    for name, versions in by_model.items():
        failures = ((*key.partition("/"), why) for key, why in desired.failures.items())
        failed = {
            version: why for model, slash, version, why in failures if slash and model == name
        }
        revision = Revision(1, versions, failed, fingerprints.get(name, ""))
        implied = name in desired.implied
        load = parts.reconciler.models.load
        effects += load(name, revision, now, required=True, implied=implied)
    if desired.is_empty:
        _log.warning("%s", "; ".join(["model_repository has no model", *desired.skipped()]))
    if parts.control.watches:
        count = len(fingerprints)
        _log.info("watching %d model%s: changed models are loaded anew", count, "s"[: count != 1])
    for name, reason in desired.failures.items():
        _log.error("model cannot be served", extra=log_fields(model=name, reason=reason))
    parts.effects.perform([*effects, *parts.reconciler.scanned(desired.failures)])


def resume(parts: Parts, checkpoint: Checkpoint, previous: Snapshot | None) -> None:
    """Continue from the checkpoint of an earlier coordinator, which published `previous`."""
    now = time.monotonic()
    parts.reconciler.models.restore(checkpoint.models, checkpoint.next_number, now)
    parts.sync.instances.update(checkpoint.instances)
    effects = parts.reconciler.scanned(checkpoint.failures)
    if previous is not None:
        parts.reconciler.restore(previous, now)
        parts.regions.restore(previous, now)
        parts.publication.restore(previous)
        parts.runtime_settings.restore(previous)
        if parts.introspection.monitoring is not None:
            parts.introspection.monitoring.take_over()
    parts.sync.hold(now)
    parts.sync.changed()
    parts.effects.perform(effects)


def waits_for_models(settings: Settings, library: Library) -> bool:
    """Return True if a model to serve has never been fetched."""
    wanted = settings.load_models if settings.model_control == "explicit" else ("*",)
    return model_places.fetches(settings) and library.pending(
        model_places.repository_paths(settings), wanted
    )


def survey(settings: Settings, library: Library) -> dict[str, str]:
    """Return the fingerprints of all models, by name. Return {} if the repository cannot be
    read."""
    try:
        return library.survey(model_places.repository_paths(settings))
    except ConfigError:  # the scan will report the error
        return {}


class RemoteStart(Struct):
    """Start of a service with remote model repositories, in rounds of the fetcher. The service
    starts at once if the cache holds every wanted model. Otherwise the service waits until the
    models have been fetched.

    `_waiting`: the models of the first scan have not been handed to the reconciler yet. `_reading`:
    a background thread reads these models."""

    _settings: Settings
    _library: Library
    _background: Background
    _parts: Parts
    _tried: dict[str, str]
    _waiting: bool
    _reading: bool = False

    def fetched(self, message: ModelsFetched) -> None:
        """Take in the end of a round."""
        unlisted = "; ".join(message.unlisted)
        notices = {**self._parts.control.remote.notices, **({"": unlisted} if unlisted else {})}
        self._parts.publication.tell(notices)
        if not self._waiting:
            self._parts.control.renew()
        elif self._reading:
            return  # `_begin` renews
        elif not self._library.pending(model_places.repository_paths(self._settings), ()):
            self._reading = True
            if not self._background.submit(self._read, self._begin):
                self._wait()
        else:
            _log.error("not ready: %s", unlisted)

    def _read(self) -> tuple[dict[str, str], DesiredModels]:
        marks = survey(self._settings, self._library)
        return marks, desired_models.choose(self._settings, self._library.scan)

    def _begin(self, found: tuple[dict[str, str], DesiredModels] | Exception) -> None:
        if isinstance(found, Exception):
            self._wait()
            return
        self._waiting = self._reading = False
        self._tried.update(found[0])
        begin(self._parts, found[1], found[0])
        self._parts.control.renew()

    def _wait(self) -> None:
        self._reading = False
        self._parts.control.remote.again()
