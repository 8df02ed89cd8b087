"""The cluster drill in short: `python -m tests.crash.cluster` is the long form."""

import json
from pathlib import Path

import pytest

from tests.servers import python


@pytest.mark.needs("haproxy", "ray")
@pytest.mark.timeout(400)
def test_no_request_is_lost_while_nodes_are_killed_and_come(tmp_path: Path) -> None:
    """Runs in a separate process, because Ray leaves threads and descriptors behind."""
    output = tmp_path / "report.json"
    words = ("--seconds", "0", "--output", output)
    python("-m", "tests.crash.cluster", *words, timeout_s=390)
    report = json.loads(output.read_text())
    counts = report["counts"]
    assert counts["sent"] == counts["answered at once"] + counts.get("answered after a retry", 0)
    assert report["wrong"] == []
    assert report["left"] == []
    assert report["over_grpc"] == {name: [2.0, 3.0] for name in ("one", "two", "both")}
    assert report["scaled"]["replicas"] == 2
    assert report["controller"]["moved"] == {}
    assert report["second_node"]["first_answer_s"] > 0
    assert [event["killed_with"] for event in report["events"] if event["killed_with"]]
    assert "both" in report["status"]
    assert report["down"] == "the cluster is down"
