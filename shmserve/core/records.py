"""What the coordinator knows of processes, instances and model versions, and how it reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shmserve.core.lifecycle import State
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState
from shmserve.tensor.spec import ModelSpec


@dataclass(slots=True)
class ProcessRecord:
    """A process with a link. `since`: when it said hello."""

    name: str
    role: str
    pid: int
    since: float
    instance: str = ""  # executors: what they run


@dataclass(slots=True)
class InstanceRecord:
    """One instance of a model version, whatever process runs it at the moment."""

    name: str
    state: State = State.WANTED
    since: float = 0.0  # when it came into this state
    pid: int = 0  # its current process; 0: none known
    process: str = ""  # that process's link; empty: none
    endpoint: str = ""
    reason: str = ""  # of its latest misfortune
    awaited_until: float = 0.0  # after a coordinator restart: its executor may still say hello
    exits: int = 0

    @property
    def live(self) -> bool:
        """Whether it takes requests."""
        return self.state is State.READY and bool(self.endpoint)

    def forget_process(self) -> None:
        self.pid = 0
        self.process = ""
        self.endpoint = ""
        self.awaited_until = 0.0


@dataclass(slots=True)
class VersionRecord:
    """One version of one model and its instances."""

    spec: ModelSpec
    instances: list[InstanceRecord] = field(default_factory=list)
    loaded: bool = False  # some instance has loaded it, so `spec` is complete

    def entry(self) -> ModelEntry:
        """How it is published."""
        failed = [i for i in self.instances if i.state is State.FAILED]
        reason = next((i.reason for i in self.instances if i.reason), "")
        if not self.instances or len(failed) == len(self.instances):
            reason = failed[0].reason if failed else "the model has no instances"
            return ModelEntry(self.spec, ModelState.UNAVAILABLE, (), reason)
        if not self.loaded:
            return ModelEntry(self.spec, ModelState.LOADING, (), reason)
        live = tuple(
            LiveInstance(i.name, i.process, i.endpoint, i.pid) for i in self.instances if i.live
        )
        return ModelEntry(self.spec, ModelState.READY, live, "" if live else reason)


def published(versions: Iterable[VersionRecord]) -> dict[str, dict[str, ModelEntry]]:
    """The registry's `models`."""
    models: dict[str, dict[str, ModelEntry]] = {}
    for version in versions:
        models.setdefault(version.spec.name, {})[version.spec.version] = version.entry()
    return models
