"""Records: the coordinator's knowledge of processes, instances, versions and models, and its
published form.

The coordinator's checkpoint holds revisions and models unchanged, for a successor.
`coordinator.state.checkpoint` clears the fields that a successor must not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shmserve.core.control.lifecycle import Event, State, step
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState
from shmserve.tensor.spec import ModelSpec

UNLOADED = "unloaded"


@dataclass(slots=True)
class ProcessRecord:
    """Process with a link. `since`: time of its hello."""

    name: str
    role: str
    pid: int
    since: float
    instance: str = ""  # executors: instance that the process runs


@dataclass(slots=True)
class InstanceRecord:
    """Instance of one revision of a version, independent of the process that runs the instance
    now."""

    name: str
    state: State = State.WANTED
    since: float = 0.0  # time of the last change of state
    pid: int = 0  # current process; 0: none known
    process: str = ""  # link of the process; empty: none
    endpoint: str = ""
    reason: str = ""  # cause of the latest failure
    awaited_until: float = 0.0  # after a coordinator restart: time limit for the executor's hello
    exits: int = 0
    loaded: bool = False  # a process of the instance has loaded the model
    tries: int = 0  # processes that ended before any had loaded the model
    deadline: float = 0.0  # time limit for the first load of the model
    leave_at: float = 0.0  # another instance has taken over: time to leave; 0: stays
    left: bool = False  # dismissed: never desired again
    busy: bool = False  # the latest report showed a running request
    device: str = "cpu"  # intended device; once loaded, the actual device

    @property
    def live(self) -> bool:
        """True if the instance takes requests."""
        return self.state is State.READY and bool(self.endpoint)

    @property
    def desired(self) -> bool:
        """True if the supervisor should run the instance."""
        return not self.left and self.state not in (State.FAILED, State.STOPPING)

    @property
    def hurried(self) -> bool:
        """True if the process gets no time to finish, because it is stuck or has no work to
        finish."""
        stuck = self.state in (State.STOPPING, State.FAILED) and not self.left
        return bool(self.pid) and (stuck or (self.left and not self.loaded))

    @property
    def gone(self) -> bool:
        """True if the instance is dismissed and has no process left."""
        return self.left and not self.pid and not self.process

    def step(self, event: Event, now: float, reason: str | None = None) -> None:
        """Apply an event to the state. `reason`: cause, if the event is a failure."""
        after = step(self.state, event, self.name)
        if after is not self.state:
            self.state, self.since = after, now
        if reason is not None:
            self.reason = reason

    def run_as(self, pid: int, process: str = "") -> None:
        """Note the process that runs the instance. `process`: link of the process, empty if
        none."""
        self.pid, self.process = pid, process or self.process
        if process:
            self.awaited_until = 0.0

    def restore(self, published: LiveInstance, now: float, until: float) -> None:
        """Restore a published instance after a coordinator restart. Its executor may say hello
        until `until`."""
        self.state, self.since = State.READY, now
        self.loaded, self.awaited_until = True, until
        self.pid, self.process = published.pid, published.process
        self.endpoint, self.device = published.endpoint, published.device

    def accept_load(self, endpoint: str, device: str) -> None:
        """Note that the executor has loaded the model and takes requests. `device`: device
        reported by the executor, or empty."""
        self.endpoint, self.reason, self.awaited_until = endpoint, "", 0.0
        self.loaded, self.device = True, device or self.device

    def lose_link(self) -> None:
        self.process = self.endpoint = ""

    def begin_load(self, now: float, limit_s: float) -> None:
        """Start the clock of a new instance, which must load its model within the limit."""
        self.since, self.deadline = now, now + limit_s

    def without_process(self, device: str) -> InstanceRecord:
        """Return a record of the instance for a successor. `device`: intended device."""
        failed = self.state is State.FAILED
        state, reason = (State.FAILED, self.reason) if failed else (State.WANTED, "")
        return InstanceRecord(self.name, state, reason=reason, loaded=self.loaded, device=device)

    def dismiss(self, now: float) -> None:
        """Dismiss the instance for ever, and stop its process if one runs."""
        self.left = True
        if self.state in (State.STARTING, State.LOADING, State.READY):
            self.step(Event.STOP, now)

    def forget_process(self) -> None:
        self.pid, self.awaited_until, self.busy = 0, 0.0, False
        self.lose_link()


@dataclass(slots=True)
class VersionRecord:
    """Version of one revision, with its instances."""

    spec: ModelSpec
    instances: list[InstanceRecord] = field(default_factory=list)
    loaded: bool = False  # an instance has loaded the model, so `spec` is complete

    @property
    def failure(self) -> str:
        """Reason why the version cannot be served; empty if it can, or if the outcome is open."""
        if self.spec.steps:
            return ""
        if not self.instances:
            return "the model has no instances"
        if all(i.state is State.FAILED for i in self.instances):
            return self.instances[0].reason
        return ""

    def entry(self, required: bool = True) -> ModelEntry:
        """Return the published entry. `core.control.compositions` decides the final entry of an
        ensemble."""
        if self.failure:
            unavailable = ModelState.UNAVAILABLE
            return ModelEntry(self.spec, unavailable, (), self.failure, required=required)
        reason = next((i.reason for i in self.instances if i.reason), "")
        if not self.loaded:
            return ModelEntry(self.spec, ModelState.LOADING, (), reason, required=required)
        live = tuple(
            LiveInstance(i.name, i.process, i.endpoint, i.pid, i.device)
            for i in self.instances
            if i.live
        )
        reason = "" if live else reason
        return ModelEntry(self.spec, ModelState.READY, live, reason, required=required)


@dataclass(slots=True)
class Revision:
    """Result of one load of a model: the versions as read then, with instances of their own.

    Attributes:
        failures: requested versions that could not be described, with reasons.
        fingerprint: mark of the sources; differs once the sources have changed.
        overrides: name of the files sent with the load request; empty: the model comes from the
            repository.
    """

    number: int
    versions: list[VersionRecord]
    failures: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    overrides: str = ""

    def instances(self) -> Iterator[InstanceRecord]:
        for version in self.versions:
            yield from version.instances

    @property
    def settled(self) -> bool:
        """True if each instance has loaded the model once, or never will."""
        return all(i.loaded or i.state is State.FAILED for i in self.instances())

    @property
    def complete(self) -> bool:
        """True if every instance takes requests."""
        return all(i.live for i in self.instances())

    @property
    def working(self) -> bool:
        """True if a version of the revision can be served, now or perhaps later."""
        return any(not version.failure for version in self.versions)

    def problems(self) -> dict[str, str]:
        """Return version -> reason why the version, or one of its instances, cannot be served."""
        problems = dict(self.failures)
        for version in self.versions:
            failed = [i.reason for i in version.instances if i.state is State.FAILED]
            if failed or version.failure:
                problems[version.spec.version] = failed[0] if failed else version.failure
        return problems


@dataclass(slots=True)
class ModelRecord:
    """Model by name, with its serving, coming and leaving revisions.

    Attributes:
        refused: version (empty: the whole model) -> reason why the latest load left the version
            out.
        error: outcome of the latest load.
        loading: True until `serving` is settled, if no working revision was there before.
        required: True if the server is not ready without the model.
        implied: True if the model was loaded only as a step of an ensemble.
    """

    name: str
    required: bool = False
    serving: Revision | None = None
    coming: Revision | None = None
    leaving: list[Revision] = field(default_factory=list)
    unloaded: dict[str, ModelSpec] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    error: str = ""
    loading: bool = False
    removed: bool = False  # the folder is gone: forget the model with its last process
    implied: bool = False

    def begin_load(self, revision: Revision, required: bool, implied: bool) -> Revision | None:
        """Begin to load a revision beside a working revision, or in place of a failed one.

        Return the replaced revision, or None if nothing was replaced.
        """
        self.removed, self.error, self.refused = False, "", {}
        self.implied = implied
        if self.working:
            self.coming = revision
            return None
        replaced, self.serving = self.serving, revision
        self.loading, self.required, self.unloaded = True, required, {}
        return replaced

    def end_load(self, problems: dict[str, str], refused: dict[str, str]) -> None:
        """End a load. `problems` covers all failed versions, `refused` the versions left out."""
        self.coming, self.loading = None, False
        self.error, self.refused = in_words(problems), refused

    def replace(self, coming: Revision) -> None:
        """Let a coming revision take over from the serving one."""
        self.serving, self.coming = coming, None

    def unload(self, removed: bool) -> None:
        """Stop serving. Remember the served versions unless `removed`."""
        self.refused, self.error, self.removed = {}, "", removed
        if removed:
            self.unloaded = {}
        elif self.serving is not None:
            self.unloaded = {v.spec.version: v.spec for v in self.serving.versions}
        self.serving = None

    @property
    def changing(self) -> bool:
        """True while a load is under way."""
        return self.coming is not None or self.loading

    @property
    def working(self) -> bool:
        """True if the model is served, now or perhaps later."""
        return self.serving is not None and self.serving.working

    def steps(self) -> set[str]:
        """Return the models that are steps of the model's versions."""
        versions = self.serving.versions if self.serving is not None else []
        return {step.model for version in versions for step in version.spec.steps}

    def revisions(self) -> Iterator[Revision]:
        yield from (i for i in (self.serving, self.coming) if i is not None)
        yield from self.leaving

    def entries(self) -> dict[str, ModelEntry]:
        """Return version -> published entry."""
        if self.serving is not None:
            return {v.spec.version: v.entry(self.required) for v in self.serving.versions}
        busy = any(i.busy for revision in self.leaving for i in revision.instances())
        state = ModelState.UNLOADING if busy else ModelState.UNAVAILABLE
        return {
            version: ModelEntry(spec, state, (), UNLOADED, required=False)
            for version, spec in self.unloaded.items()
        }


def in_words(problems: dict[str, str]) -> str:
    """Return problems of versions as one sentence; empty if there are none."""
    return "; ".join(
        f"version {version}: {reason}" if version and f"version {version}" not in reason else reason
        for version, reason in sorted(problems.items())
    )


def refused(models: Iterable[ModelRecord]) -> dict[str, str]:
    """Return the registry's `refused`: model, or model/version -> reason."""
    reasons: dict[str, str] = {}
    for model in models:
        published = model.entries() if model.refused else {}
        for version, reason in model.refused.items():
            if version not in published and not (version == "" and published):
                reasons[f"{model.name}/{version}" if version else model.name] = reason
    return reasons
