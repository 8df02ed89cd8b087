"""Control request: a request to load or unload one model, from arrival to answer."""

from enum import Enum, auto

from msgspec import Struct

from shmserve.coordinator.models.repository_jobs import ModelReader


class Stage(Enum):
    QUEUED = auto()
    FETCHING = auto()  # the fetcher is getting the model from a remote repository
    READING = auto()
    STEPS = auto()  # the models of an ensemble's steps are being loaded
    LOADING = auto()


class ControlRequest(Struct, eq=False):
    """Request to load or unload a model.

    `ticket`: 0 if no client asked, because the repository has changed or an ensemble needs the
    model. `implied`: load the model for an ensemble. `dependents`: unload an ensemble together
    with its steps. `found`: contents of the model's folder, only for an ensemble. `begun_at`: start
    of the load, which has made revision number `revision`.
    """

    name: str
    load: bool
    asker: str = ""
    ticket: int = 0
    overrides: str = ""
    removed: bool = False  # unload because the model's folder is gone
    kept: bool = False  # a revision uses the overrides
    stage: Stage = Stage.QUEUED
    implied: bool = False
    dependents: bool = False
    found: ModelReader | None = None
    begun_at: float = 0.0
    revision: int = 0

    def steps(self) -> set[str]:
        """Return the models of the ensemble to be loaded. The set is empty for any other model."""
        specs = [spec for spec, _ in self.found.versions] if self.found is not None else []
        return {step.model for spec in specs for step in spec.steps}
