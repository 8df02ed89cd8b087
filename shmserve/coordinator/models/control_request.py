"""A request to load or unload one model, while model control has it."""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct

from shmserve.coordinator.models.model_reader import ModelReader


class Stage(Enum):
    """How far a request is."""

    QUEUED = auto()
    FETCHING = auto()  # what its repository, which is elsewhere, has of it
    READING = auto()
    STEPS = auto()  # an ensemble: the models of its steps are being loaded
    LOADING = auto()


class ControlRequest(Struct, eq=False):
    """One request; `ticket` 0: the repository has changed or an ensemble needs it, nobody asked.

    `implied`: load it for an ensemble. `dependents`: of a request to unload an ensemble: its
    steps, too. `found`: what the request is to load, where it is an ensemble.
    """

    name: str
    load: bool
    asker: str = ""
    ticket: int = 0
    overrides: str = ""
    removed: bool = False  # unload: the model's folder is gone
    kept: bool = False  # a revision is made of the overrides
    stage: Stage = Stage.QUEUED
    implied: bool = False
    dependents: bool = False
    found: ModelReader | None = None

    def reach(self, stage: Stage) -> None:
        """Come to a later stage."""
        self.stage = stage

    def begin_steps(self, found: ModelReader) -> None:
        """The request is for an ensemble, whose models are loaded first."""
        self.found, self.stage = found, Stage.STEPS

    def begin_load(self, kept: bool) -> None:
        """A revision is made. `kept`: of the overrides."""
        self.kept, self.stage = kept, Stage.LOADING

    def steps(self) -> set[str]:
        """The models of the ensemble that is to be loaded."""
        specs = [spec for spec, _ in self.found.versions] if self.found is not None else []
        return {step.model for spec in specs for step in spec.steps}
