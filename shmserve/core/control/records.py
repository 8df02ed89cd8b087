"""What the coordinator knows of processes, instances, versions and models, and how it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shmserve.core.control.lifecycle import Event, State, step
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState
from shmserve.tensor.spec import ModelSpec

UNLOADED = "unloaded"


@dataclass(slots=True)
class ProcessRecord:
    """A process with a link. `since`: when it said hello."""

    name: str
    role: str
    pid: int
    since: float
    instance: str = ""  # executors: what they run

    def adopt(self, instance: str) -> None:
        """The executor runs this instance."""
        self.instance = instance

    def release(self) -> None:
        """It runs its instance no more."""
        self.instance = ""


@dataclass(slots=True)
class InstanceRecord:
    """One instance of one revision of a version, whatever process runs it at the moment."""

    name: str
    state: State = State.WANTED
    since: float = 0.0  # when it came into this state
    pid: int = 0  # its current process; 0: none known
    process: str = ""  # that process's link; empty: none
    endpoint: str = ""
    reason: str = ""  # of its latest misfortune
    awaited_until: float = 0.0  # after a coordinator restart: its executor may still say hello
    exits: int = 0
    loaded: bool = False  # some process of it has loaded the model
    tries: int = 0  # processes of it that ended before one had
    deadline: float = 0.0  # until then the model must have been loaded once
    leave_at: float = 0.0  # another has taken over: it goes then; 0: it stays
    left: bool = False  # it is going: never desired again
    busy: bool = False  # when last asked it was running a request
    device: str = "cpu"  # where it should compute; once loaded, where it does

    @property
    def live(self) -> bool:
        """Whether it takes requests."""
        return self.state is State.READY and bool(self.endpoint)

    @property
    def desired(self) -> bool:
        """Whether the supervisor should run it."""
        return not self.left and self.state not in (State.FAILED, State.STOPPING)

    @property
    def hurried(self) -> bool:
        """Whether its process must not be given time to finish: it is stuck, or has nothing."""
        stuck = self.state in (State.STOPPING, State.FAILED) and not self.left
        return bool(self.pid) and (stuck or (self.left and not self.loaded))

    @property
    def gone(self) -> bool:
        """Whether it is going and no process of it is left."""
        return self.left and not self.pid and not self.process

    def step(self, event: Event, now: float, reason: str | None = None) -> None:
        """Come into the state that an event leads to. `reason`: the misfortune, if it is one."""
        after = step(self.state, event, self.name)
        if after is not self.state:
            self.state, self.since = after, now
        if reason is not None:
            self.reason = reason

    def run_as(self, pid: int, process: str = "") -> None:
        """A process runs the instance. `process`: its link, if it has one."""
        self.pid, self.process = pid, process or self.process
        if process:
            self.awaited_until = 0.0

    def restore(self, published: LiveInstance, now: float, until: float) -> None:
        """After a coordinator restart: its executor served, and has `until` then to say hello."""
        self.state, self.since = State.READY, now
        self.loaded, self.awaited_until = True, until
        self.pid, self.process = published.pid, published.process
        self.endpoint, self.device = published.endpoint, published.device

    def accept_load(self, endpoint: str, device: str) -> None:
        """Its executor has loaded the model and takes requests. `device`: if it said where."""
        self.endpoint, self.reason, self.awaited_until = endpoint, "", 0.0
        self.loaded, self.device = True, device or self.device

    def lose_link(self) -> None:
        self.process = self.endpoint = ""

    def count_end(self) -> None:
        """A process of it has ended."""
        self.exits += 1

    def fail_try(self, reason: str, tries: int) -> None:
        """A process of it ended by itself. `tries`: 1 if none has loaded the model yet."""
        self.reason = reason
        self.tries += tries

    def begin_load(self, now: float, limit_s: float) -> None:
        """It is new, and must have loaded its model within the limit."""
        self.since, self.deadline = now, now + limit_s

    def linger(self, until: float) -> None:
        """Another instance has taken over: this one goes then."""
        self.leave_at = until

    def dismiss(self, now: float) -> None:
        """It is never desired again, and stops if it runs."""
        self.left = True
        if self.state in (State.STARTING, State.LOADING, State.READY):
            self.step(Event.STOP, now)

    def forget_process(self) -> None:
        self.pid = 0
        self.process = ""
        self.endpoint = ""
        self.awaited_until = 0.0
        self.busy = False


@dataclass(slots=True)
class VersionRecord:
    """One version of one revision and its instances."""

    spec: ModelSpec
    instances: list[InstanceRecord] = field(default_factory=list)
    loaded: bool = False  # some instance has loaded it, so `spec` is complete

    @property
    def failure(self) -> str:
        """Why it cannot be served; empty: it can, or it is not known yet."""
        if self.spec.steps:
            return ""
        if not self.instances:
            return "the model has no instances"
        if all(i.state is State.FAILED for i in self.instances):
            return self.instances[0].reason
        return ""

    def entry(self, required: bool = True) -> ModelEntry:
        """How it is published; an ensemble once `core.control.compositions` has decided."""
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
    """One loading of a model: its versions as they were read then, with instances of its own.

    `failures`: versions that were asked for and could not be described. `fingerprint` tells
    whether what it was made of has changed; `overrides` names the files that came with the
    request to load it, empty: it comes from the repository.
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
        """Whether each instance has loaded the model once, or never will."""
        return all(i.loaded or i.state is State.FAILED for i in self.instances())

    @property
    def complete(self) -> bool:
        """Whether every instance takes requests."""
        return all(i.live for i in self.instances())

    @property
    def working(self) -> bool:
        """Whether some version of it can be served, or may yet be."""
        return any(not version.failure for version in self.versions)

    def problems(self) -> dict[str, str]:
        """Version -> why it, or an instance of it, cannot be served."""
        problems = dict(self.failures)
        for version in self.versions:
            failed = [i.reason for i in version.instances if i.state is State.FAILED]
            if failed or version.failure:
                problems[version.spec.version] = failed[0] if failed else version.failure
        return problems


@dataclass(slots=True)
class ModelRecord:
    """A model by name: the revision that serves, the one that will, those that go.

    `loading`: `serving` has replaced nothing and is not settled. `refused`: version (empty:
    the whole model) -> why the latest load left it out. `error`: outcome of the latest load.
    `required`: the server is not ready without it. `implied`: loaded for an ensemble that it is a
    step of, and not for itself.
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
    removed: bool = False  # its folder is gone: forget it with its last process
    implied: bool = False

    def begin_load(self, revision: Revision, required: bool, implied: bool) -> Revision | None:
        """Load a revision beside one that works, or in place of one that does not.

        Return the revision whose place it takes, or None if there is none.
        """
        self.removed, self.error, self.refused = False, "", {}
        self.implied = implied
        if self.working:
            self.coming = revision
            return None
        replaced, self.serving = self.serving, revision
        self.loading, self.required, self.unloaded = True, required, {}
        return replaced

    def claim(self) -> None:
        """The model is wanted for itself, too: unloading an ensemble leaves it."""
        self.implied = False

    def refuse(self, problems: dict[str, str]) -> None:
        """A load came to nothing: the model could not even be described."""
        self.refused = dict(problems)

    def end_load(self, problems: dict[str, str], refused: dict[str, str]) -> None:
        """A load is over, with these problems of versions, `refused` among them."""
        self.coming, self.loading = None, False
        self.error, self.refused = in_words(problems), refused

    def replace(self, coming: Revision) -> None:
        """A revision takes over from the one that has served."""
        self.serving, self.coming = coming, None

    def unload(self, removed: bool) -> None:
        """Serve nothing; the versions that were served are remembered unless `removed`."""
        self.refused, self.error, self.removed = {}, "", removed
        if removed:
            self.unloaded = {}
        elif self.serving is not None:
            self.unloaded = {v.spec.version: v.spec for v in self.serving.versions}
        self.serving = None

    @property
    def changing(self) -> bool:
        """Whether a load is under way."""
        return self.coming is not None or self.loading

    @property
    def working(self) -> bool:
        """Whether it is served, or may yet be."""
        return self.serving is not None and self.serving.working

    def steps(self) -> set[str]:
        """The models that its versions, being ensembles, consist of."""
        versions = self.serving.versions if self.serving is not None else []
        return {step.model for version in versions for step in version.spec.steps}

    def revisions(self) -> Iterator[Revision]:
        yield from (i for i in (self.serving, self.coming) if i is not None)
        yield from self.leaving

    def entries(self) -> dict[str, ModelEntry]:
        """Version -> how it is published."""
        if self.serving is not None:
            return {v.spec.version: v.entry(self.required) for v in self.serving.versions}
        busy = any(i.busy for revision in self.leaving for i in revision.instances())
        state = ModelState.UNLOADING if busy else ModelState.UNAVAILABLE
        return {
            version: ModelEntry(spec, state, (), UNLOADED, required=False)
            for version, spec in self.unloaded.items()
        }


def in_words(problems: dict[str, str]) -> str:
    """Problems of versions in one sentence; empty: there are none."""
    return "; ".join(
        f"version {version}: {reason}" if version and f"version {version}" not in reason else reason
        for version, reason in sorted(problems.items())
    )


def refused(models: Iterable[ModelRecord]) -> dict[str, str]:
    """The registry's `refused`: model, or model/version, -> reason."""
    reasons: dict[str, str] = {}
    for model in models:
        published = model.entries() if model.refused else {}
        for version, reason in model.refused.items():
            if version not in published and not (version == "" and published):
                reasons[f"{model.name}/{version}" if version else model.name] = reason
    return reasons
