"""Commands that query a running server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.servers import Server, run_shmserve


def command(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    return run_shmserve(*words, environ=server.environ)


def measured(server: Server, *words: str, status: int = 0) -> list[dict[str, Any]]:
    done = command(server, "measure", *words, "--warm-up", "0", "--json")
    assert (done.returncode, done.stderr) == (status, "")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_model_is_measured_over_every_door(server: Server, tmp_path: Path) -> None:
    drawing = tmp_path / "m.svg"
    words = ("--requests", "20", "--size", "4096", "--concurrency", "2", "--svg", str(drawing))
    rows = {row["over"]: row for row in measured(server, "identity", *words)}
    assert list(rows) == ["http", "grpc", "region", "lane"]
    for row in rows.values():
        assert (row["requests"], row["failed"], row["error"], row["errors"]) == (20, 0, "", [])
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["mb_per_s"] == pytest.approx(row["per_s"] * 8 * 4096 / 1e6, rel=0.02)
    assert rows["region"]["copied_bytes"] == rows["lane"]["copied_bytes"] == "0"
    assert drawing.read_text().count("<polyline") == 8
    again = command(server, "measure", "noop", "--requests", "3", "--over", "lane")
    assert again.stdout.splitlines()[0].split()[:4] == ["over", "concurrency", "requests", "failed"]


def test_streams_are_measured(server: Server, tmp_path: Path) -> None:
    np.save(tmp_path / "delays.npy", np.array([40, 40, 40], np.uint32))
    words = ("--requests", "4", "--size", "3", "--input", f"DELAY={tmp_path}/delays.npy")
    rows = measured(server, "repeat_int32", *words)
    assert [row["over"] for row in rows] == ["http", "grpc", "lane"]
    for row in rows:
        assert (row["requests"], row["failed"], row["error"]) == (4, 0, "")
        assert row["answers_per_s"] == pytest.approx(3 * row["per_s"], rel=0.1)
        assert row["first_p50_ms"] >= 40, "40 ms before each answer"
        assert row["between_p50_ms"] >= 20
        assert row["p50_ms"] >= 120
    (row,) = measured(server, "repeat_int32", "--over", "region", status=1)
    assert row["error"] == "--over region: a decoupled model answers over http, grpc and lane"


def test_a_rate_and_levels_are_measured(server: Server) -> None:
    words = ("--rate", "200", "--poisson", "--requests", "20", "--over", "http")
    (row,) = measured(server, "noop", *words)
    assert (row["requests"], row["concurrency"]) == (20, 16)
    assert 0 <= row["late"] <= 20
    words = ("--requests", "20", "--over", "http", "lane", "--concurrency", "1:4")
    rows = measured(server, "noop", *words)
    assert [(row["over"], row["concurrency"]) for row in rows] == [
        (over, level) for over in ("http", "lane") for level in (1, 2, 4)
    ]
    assert all(row["requests"] == 20 for row in rows)
    for over in ("http", "lane"):
        assert sum(row["knee"] for row in rows if row["over"] == over) <= 1


def test_failures_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "sometimes"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(SOMETIMES_CONFIG)
    (folder / "1/model.py").write_text(SOMETIMES)
    with Server(tmp_path, http_workers=1) as server:
        server.wait_instances()
        words = ("--requests", "30", "--over", "http", "grpc")
        rows = measured(server, "sometimes", *words, status=1)
        for row, status in zip(rows, ("500", "INTERNAL"), strict=True):
            assert (row["requests"], row["failed"]) == (20, 10)
            ((error,), reason) = row["errors"], row["error"]
            assert (error["status"], error["count"], reason) == (status, 10, "")
            assert "every third" in error["text"]
        done = command(server, "measure", "sometimes", *words, "--warm-up", "0")
        assert "http at 1: 10 failed, 500: " in done.stdout


SOMETIMES_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
SOMETIMES = """
class Model:
    calls = 0

    def infer(self, request):
        self.calls += 1
        if self.calls % 3 == 0:
            raise ValueError("every third request is wrong")
        request.output("OUT", (1,))[:] = request.input("IN")
"""


def test_what_cannot_be_measured_is_told(server: Server) -> None:
    done = command(server, "measure", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shmserve: nothing: ")
    assert done.stderr.count("\n") == 1
    done = command(server, "measure", "noop", "--poisson")
    assert (done.returncode, done.stderr) == (2, "shmserve: --poisson: give --rate as well\n")


def test_a_service_without_keeper_or_systemd_is_not_handed_over() -> None:
    """The process that started gunicorn would take the old master's end for the service's."""
    with Server(reload="handover") as server:
        masters = server.pids("master")
        done = command(server, "reload")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "shmserve: the old generation serves on: gunicorn was started directly, so its end"
            " would be the end of the service for whoever did that; start it with"
            " `shmserve serve`\n"
        )
        assert server.pids("master") == masters
        assert server.ready()


def test_readiness_and_control(server: Server) -> None:
    for words in (["ready"], ["ready", "identity"]):
        assert command(server, *words).returncode == 0
    done = command(server, "ready", "nothing")
    assert done.returncode == 1
    assert done.stdout.startswith("nothing is not ready: ")
    done = command(server, "load", "identity")  # this server forbids model control by clients
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shmserve: load identity: ")


def test_the_live_view_of_a_server(server: Server) -> None:
    done = command(server, "show", "top", "--interval", "0.1")
    assert done.returncode == 0
    assert "identity" in done.stdout
    assert "supervisor" in done.stdout


def test_a_wrong_input_is_told_the_right_ones(server: Server) -> None:
    tensor = {"shape": [16], "datatype": "INT32", "data": [1] * 16}
    wrong = {"inputs": [{"name": "X", **tensor}, {"name": "INPUT1", **tensor}]}
    status, answer = server.infer("add_sub", wrong)
    assert status == 400
    assert answer["error"].endswith(
        "unexpected inference input 'X' for model 'add_sub', whose inputs are ['INPUT0','INPUT1']"
    )
