"""Names of instances."""

import pytest

from shmserve import ids


@pytest.mark.parametrize("name", ["a", "_", "7", "a..b", "m.1+x-y_z", "x" * 255])
def test_names_of_models(name: str) -> None:
    assert ids.is_model_name(name)
    assert ids.model_name_fault(name) == ""


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "+a", "a b", "x" * 256])
def test_names_that_no_model_has(name: str) -> None:
    assert not ids.is_model_name(name)


@pytest.mark.parametrize("incarnation", [1, 2, 40])
def test_an_instances_index_is_the_same_in_every_incarnation(incarnation: int) -> None:
    name = ids.reborn(ids.instance_name("m@1", "3", 12), incarnation)
    assert ids.instance_index(name) == 12
