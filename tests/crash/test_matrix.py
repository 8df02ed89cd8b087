"""Short form of the fault matrix: some cells of `python -m tests.crash.matrix`."""

import re

import pytest

from tests.crash.matrix import cells, run

CELLS = (
    *("handover, new coordinator, kill", "handover, new master, stop"),
    *("handover, handover, segfault", "handover, old master, kill"),
)


@pytest.mark.timeout(400)
def test_faults_cost_no_wrong_answer_and_nothing_hangs_or_is_left_over() -> None:
    done = {cell.name: cell for cell in run(cell for cell in cells() if cell.name in CELLS)}
    assert done.keys() == set(CELLS)
    assert [cell for cell in done.values() if cell.failed] == []
    for name, said in (
        ("handover, new coordinator, kill", "generation g.* serves"),
        ("handover, new master, stop", ".*its master ended before it served"),
        ("handover, handover, segfault", ".*the process of the handover was killed"),
        ("handover, old master, kill", "generation g.* serves"),
    ):
        assert re.match(said, done[name].told), done[name]
