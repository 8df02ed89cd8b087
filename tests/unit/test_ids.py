"""Names of instances."""

from __future__ import annotations

import pytest

from shmserve import ids


@pytest.mark.parametrize("incarnation", [1, 2, 40])
def test_an_instances_index_is_the_same_in_every_incarnation(incarnation: int) -> None:
    name = ids.reborn(ids.instance_name("m@1", "3", 12), incarnation)
    assert ids.instance_index(name) == 12
