"""Short forms of the drills; `python -m tests.crash.DRILL` is the long form of each."""

import json
from pathlib import Path

import pytest

from tests.crash import reload, rounds
from tests.servers import Server, only, python


def test_no_request_is_lost_while_models_are_replaced(tmp_path: Path) -> None:
    with Server(reload.repository(tmp_path), **only("echo,pair"), grpc_processes=0) as server:
        verdict, samples = reload.drill(server, cycles=6, samples=3)
    assert reload.lost(verdict) == []
    assert verdict.counts["right"] > 0
    assert reload.grown(samples) == []


def test_no_request_is_lost_in_a_restart_and_a_reload() -> None:
    """Runs in a separate process, which is the parent of all processes that a service leaves
    behind, as systemd is."""
    words = ("--restarts", "1", "--reloads", "1", "--short")
    printed = python("-m", "tests.crash.restart", *words, timeout_s=170)
    steps = [json.loads(line) for line in printed.splitlines()]
    assert [step["step"] for step in steps] == ["restart", "reload", "all"]
    ways = steps[-1]["ways"]
    doors = ("new connections", "grpc", "regions", "lane", "aio")
    for way in ("right", *(f"over {door}" for door in doors)):
        assert ways.get(way, 0) > 0, way


def test_register_infer_unregister_over_http_and_grpc_at_once() -> None:
    wrong, _, problems = rounds.drill(120)
    assert (wrong, problems) == (0, [])


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
    assert report["controller"]["moved"] == []
    assert report["second_node"]["first_answer_s"] > 0
    assert [event["killed_with"] for event in report["events"] if event["killed_with"]]
    assert "both" in report["status"]
    assert report["down"] == "the cluster is down"
