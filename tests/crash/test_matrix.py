"""Short form of the fault matrix: some cells of `python -m tests.crash.matrix`."""

import json
import re

import pytest

from tests.servers import python

TOLD = {
    "handover, new coordinator, kill": "generation g.* serves",
    "handover, new master, stop": ".*its master ended before it served",
    "handover, handover, segfault": ".*the process of the handover was killed",
    "handover, old master, kill": "generation g.* serves",
}


@pytest.mark.timeout(400)
def test_faults_cost_no_wrong_answer_and_nothing_hangs_or_is_left_over() -> None:
    printed = python("-m", "tests.crash.matrix", "--only", f"^({'|'.join(TOLD)})$", timeout_s=380)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    told = {
        f"{c['stage']}, {c['process']}, {c['fault']}": c["told"] for c in map(json.loads, lines)
    }
    assert told.keys() == TOLD.keys()
    for name, words in TOLD.items():
        assert re.match(words, told[name]), (name, told[name])
