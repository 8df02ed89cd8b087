"""Snapshots of the registry with small models, for tests of what is told of them."""

from typing import Any

from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.tensor.spec import ModelSpec, TensorSpec

LIVE = (LiveInstance("m/1/0", "executor-1-aa", "x.sock", 1),)
READY, LOADING, UNAVAILABLE = ModelState.READY, ModelState.LOADING, ModelState.UNAVAILABLE


def entry(name: str, *inputs: TensorSpec, state: ModelState = READY, **spec: Any) -> ModelEntry:
    """Return version 1 of a model, with an instance if ready, else with the reason "why"."""
    live, reason = (LIVE, "") if state is READY else ((), "why")
    return ModelEntry(
        ModelSpec(name, "1", "", "python", 0, inputs, (), **spec), state, live, reason
    )


def snapshot(complete=True, draining=False, failed=None, **models) -> Snapshot:
    """Return a snapshot of models, each given as a state or an entry."""
    entries = {
        name: {"1": entry(name, state=given) if isinstance(given, ModelState) else given}
        for name, given in models.items()
    }
    return Snapshot("e1", 0, entries, complete, failed or {}, draining)
