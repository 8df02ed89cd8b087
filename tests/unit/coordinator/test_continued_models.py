"""Models that a new generation loads besides those named in its settings."""

import pytest

from shmserve.config import Settings
from shmserve.coordinator.models.desired_models import continued
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.tensor.spec import ModelSpec


def snapshot(**models: ModelState) -> Snapshot:
    entries = {
        name: {"1": ModelEntry(ModelSpec(name, "1", "", "python", 0, (), ()), state)}
        for name, state in models.items()
    }
    return Snapshot("e1", 0, entries, True)


BEFORE = snapshot(
    a=ModelState.READY, b=ModelState.READY, c=ModelState.UNAVAILABLE, chain=ModelState.READY
)


def test_models_that_were_loaded_by_name_are_loaded_again() -> None:
    settings = Settings(
        model_control="explicit", load_models=("a", "d"), pipelines={"chain": ("a", "b")}
    )
    assert continued(settings, BEFORE).load_models == ("a", "d", "b")


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(model_control="explicit", load_models=("*",))]
)
def test_where_all_are_loaded_nothing_is_added(settings: Settings) -> None:
    assert continued(settings, BEFORE) is settings
