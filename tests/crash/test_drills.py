"""Short forms of the drills; `python -m tests.crash.DRILL` is the long form of each."""

import json
from pathlib import Path

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
