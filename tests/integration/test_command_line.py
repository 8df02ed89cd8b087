"""Commands that query a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shmserve.testing.running_server import ROOT, RunningServer


def shmserve(
    server: RunningServer, *words: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmserve", *words],
        env=environ or server.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_is_measured_over_every_door(server: RunningServer, tmp_path: Path) -> None:
    drawing = tmp_path / "m.svg"
    words = ("--requests", "20", "--size", "4096", "--concurrency", "2", "--svg", str(drawing))
    done = shmserve(server, "measure", "identity", *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["over"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["http", "grpc", "region", "lane"]
    for row in rows.values():
        assert (row["requests"], row["failed"], row["error"]) == (20, 0, "")
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert rows["region"]["copied_bytes"] == rows["lane"]["copied_bytes"] == "0"
    assert drawing.read_text().count("<polyline") == 8
    again = shmserve(server, "measure", "noop", "--requests", "3", "--over", "lane")
    assert again.stdout.splitlines()[0].split()[:3] == ["over", "requests", "failed"]


def test_what_cannot_be_measured_is_told(server: RunningServer) -> None:
    done = shmserve(server, "measure", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shmserve: nothing: ")
    assert done.stderr.count("\n") == 1
    done = shmserve(server, "measure", "repeat_int32", "--over", "http")
    assert done.returncode == 1
    assert "decoupled" in done.stdout


def test_a_service_without_keeper_or_systemd_is_not_handed_over(server: RunningServer) -> None:
    """The process that started gunicorn would take the end of the old master for the end of the
    service."""
    masters, environ = server.pids("master"), {**server.environ, "SHMSERVE_RELOAD": "handover"}
    done = shmserve(server, "reload", environ=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "shmserve: the old generation serves on: gunicorn was started directly, so its end would"
        " be the end of the service for whoever did that; start it with `shmserve serve`\n"
    )
    assert server.pids("master") == masters
    assert server.ready()


def test_readiness_and_control(server: RunningServer) -> None:
    for words in (["ready"], ["ready", "identity"]):
        assert shmserve(server, *words).returncode == 0
    done = shmserve(server, "ready", "nothing")
    assert done.returncode == 1
    assert done.stdout.startswith("nothing is not ready: ")
    done = shmserve(server, "load", "identity")  # this server forbids model control by clients
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shmserve: load identity: ")


def test_the_live_view_of_a_server(server: RunningServer) -> None:
    done = shmserve(server, "show", "top", "--interval", "0.1")
    assert done.returncode == 0
    assert "identity" in done.stdout
    assert "supervisor" in done.stdout


def test_a_wrong_input_is_told_the_right_ones(server: RunningServer) -> None:
    tensor = {"shape": [16], "datatype": "INT32", "data": [1] * 16}
    wrong = {"inputs": [{"name": "X", **tensor}, {"name": "INPUT1", **tensor}]}
    status, answer = server.infer("add_sub", wrong)
    assert status == 400
    assert answer["error"].endswith(
        "unexpected inference input 'X' for model 'add_sub', whose inputs are ['INPUT0','INPUT1']"
    )
