"""Publication: publishes the registry with models, regions, and settings made by clients.

The effect runner writes down, publishes and sends the reconciler's decisions."""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from shmserve import extensions
from shmserve.coordinator.models.repository_jobs import RepositoryJobs
from shmserve.coordinator.models.supervisor_sync import Send, SupervisorSync
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.coordinator.state.checkpoint import CheckpointFile
from shmserve.coordinator.state.runtime_settings import RuntimeSettingsStore
from shmserve.core import effects
from shmserve.core.control import compositions
from shmserve.core.control.compositions import Models
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import UNLOADED
from shmserve.core.registry import ALL, ModelState, Snapshot
from shmserve.core.scheduling import pipeline_wiring
from shmserve.errors import ProtocolViolation
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control.link_messages import Granted, RegistryChanged, Stop, Trim
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.triton_config import document
from shmserve.shm.registry_page import RegistryWriter
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import rundir
from shmserve.transport.processes import stat_of

_log = logging.getLogger(__name__)


class Publication(Struct):
    """Builds and publishes the snapshot, and notifies waiting processes. `flags`: initial flags.
    `pipelines`, `requires`: from the settings. `latest`: last snapshot published by this
    coordinator."""

    _writer: RegistryWriter
    _reconciler: Reconciler
    _regions: RegionRegistrations
    _runtime_settings: RuntimeSettingsStore
    _flags: dict[str, bool]
    _pipelines: Mapping[str, Sequence[str]]
    _send: Callable[[str, FromCoordinator], None]
    _requires: tuple[str, ...] = ALL
    _logged_reasons: dict[str, str] = {}
    latest: Snapshot | None = None
    notices: dict[str, str] = {}  # texts for clients about served models, by model
    _recorded: dict[str, str] = {}
    _late: bool = False

    def restore(self, previous: Snapshot) -> None:
        self._recorded = _conditions(previous)
        self._flags = {n: previous.flags.get(n, value) for n, value in self._flags.items()}

    def set_flag(self, name: str, value: bool) -> None:
        """Change a flag of an extension. Raise ProtocolViolation if the flag does not exist."""
        if name not in self._flags:
            raise ProtocolViolation(f"there is no flag '{name}'")
        self._flags = {**self._flags, name: value}
        flight_recorder.record("settings changed", name, str(value))
        self.publish()

    def tell(self, notices: dict[str, str]) -> None:
        """Publish notices: texts for clients about served models."""
        if self.notices != notices:
            self.notices = notices
            self.publish()

    def publish(self) -> bool:
        """Publish the current state. Return False if the run directory takes no file; then `look`
        tries again, and frontends continue with the previous snapshot."""
        book = self._regions.book
        snapshot = self._reconciler.snapshot(self._writer.epoch)
        models = composed(snapshot.models, self._pipelines)
        self._tell(models)
        self.latest = msgspec.structs.replace(
            snapshot,
            models=self._runtime_settings.traced(models),
            regions=book.regions,
            next_region=book.next_number,
            flags=self._flags,
            tuning=self._runtime_settings.current,
            requires=self._requires,
            notices=self.notices,
        )
        self._record(self.latest)
        self._late = self._writer.publish(self.latest) is None
        if self._late:
            return False
        self._regions.published()
        for process in self._reconciler.processes.values():
            if process.role in ("http", "grpc", "model", "supervisor"):
                self._send(process.name, RegistryChanged())
        return True

    def look(self) -> None:
        """Once a second, retry a publication that failed."""
        if self._late:
            self.publish()
        self._writer.keep_room()

    def _record(self, snapshot: Snapshot) -> None:
        """Write the snapshot's changes to the flight recorder."""
        before, conditions = self._recorded, _conditions(snapshot)
        if snapshot.draining:  # models that end with the service are not events of their own
            conditions = {**before, "service": conditions["service"]}
        self._recorded = conditions
        for key in before.keys() - self._recorded.keys():
            flight_recorder.record("model gone", key)
        for key, condition in self._recorded.items():
            if before.get(key) != condition:
                kind, _, reason = condition.partition(": ")
                flight_recorder.record(kind, key, reason)

    def _tell(self, models: Models) -> None:
        """Log why an ensemble or a pipeline cannot be used."""
        reasons = {
            f"{name}/{version}": entry.reason
            for name, versions in models.items()
            for version, entry in versions.items()
            if entry.spec.steps and entry.state is ModelState.UNAVAILABLE
        }
        for key, reason in reasons.items():
            if reason not in (UNLOADED, self._logged_reasons.get(key)):
                _log.warning("cannot be used", extra=log_fields(model=key, reason=reason))
        self._logged_reasons = reasons


def _conditions(snapshot: Snapshot) -> dict[str, str]:
    """Return, for the service and each model version, the kind of an event and the reason."""
    failed = {**snapshot.failed, **snapshot.refused}
    conditions = {name: f"model failed: {reason}" for name, reason in failed.items()}
    for name, versions in snapshot.models.items():
        for version, entry in versions.items():
            restarting = entry.state is ModelState.READY and entry.reason  # no executor serves it
            kind = f"model {'restarting' if restarting else entry.state.name.lower()}"
            conditions[f"{name}/{version}"] = f"{kind}: {entry.reason}" if entry.reason else kind
    ready = "service ready" if snapshot.ready else "service not ready"
    return {**conditions, "service": ready}


def composed(models: Models, pipelines: Mapping[str, Sequence[str]]) -> Models:
    """Return the models to publish: the loaded models, with ensembles and the pipelines of the
    setting."""
    return compositions.with_pipelines(compositions.compose(models), pipelines, make_pipeline)


def make_pipeline(name: str, models: Sequence[ModelSpec]) -> ModelSpec:
    """Return the spec of a pipeline, with the configuration shown to clients. Raise ConfigError if
    two models of the pipeline do not fit together."""
    spec = pipeline_wiring.pipeline(name, models)
    first, last = models[0].parameters, models[-1].parameters
    forms = {  # request forms besides tensors, such as messages
        form: first[form]
        for form in extensions.names(extensions.NATIVE_REQUESTS)
        if form in first and first[form] == last.get(form)
    }
    return document.completed(msgspec.structs.replace(spec, parameters=forms))


class EffectRunner(Struct, frozen=True):
    """Performs effects. Decisions of one call are written to the checkpoint before any process
    hears of them."""

    _reconciler: Reconciler
    _checkpoint: CheckpointFile
    _publication: Publication
    _sync: SupervisorSync
    _jobs: RepositoryJobs
    _send: Send
    _run_dir: str

    def perform(self, decided: Sequence[effects.Effect]) -> None:
        durable = effects.Publish | effects.Desire | effects.Forget
        if any(isinstance(effect, durable) for effect in decided):
            self._checkpoint.write(self._reconciler, self._sync.instances, self._jobs.tried)
        if any(isinstance(effect, effects.Publish) for effect in decided):
            self._publication.publish()
        for effect in decided:
            match effect:
                case effects.AnswerGrant():
                    if not effect.granted:
                        flight_recorder.record("limit reached", effect.process, effect.reason)
                    granted = Granted(effect.ticket, effect.granted, effect.reason)
                    self._send(effect.process, granted)
                case effects.AskTrim():
                    self._send(effect.process, Trim(effect.nbytes))
                case effects.Dismiss():
                    flight_recorder.record("process dismissed", effect.process, effect.reason)
                    self._send(effect.process, Stop(effect.reason))
                case effects.Desire():
                    self._sync.changed()
                case effects.Forget():
                    self._sync.forget(effect.instances)
                    if effect.overrides:
                        self._jobs.remove(effect.overrides)
                case effects.DropEndpoint():
                    if (stat := stat_of(effect.pid)) is None or stat.state == "Z":
                        rundir.clean_endpoint(self._run_dir, effect.process)
                case effects.LogForOperators():
                    about = log_fields(**effect.fields)
                    flight_recorder.record("warning", "coordinator", effect.text, effect.fields)
                    _log.warning("%s", effect.text, extra=about)
        self._sync.tell()

    def look(self) -> None:
        """Once a second, retry the checkpoint and the publication if the run directory had no
        space."""
        if self._checkpoint.file.late:
            self._checkpoint.write(self._reconciler, self._sync.instances, self._jobs.tried)
        self._checkpoint.file.keep_room()
        self._publication.look()
