"""Commands that query a running server."""

import json
import subprocess
from pathlib import Path

from tests.servers import Server, run_shmserve


def command(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    return run_shmserve(*words, environ=server.environ)


def test_a_model_is_measured_over_every_door(server: Server, tmp_path: Path) -> None:
    drawing = tmp_path / "m.svg"
    words = ("--requests", "20", "--size", "4096", "--concurrency", "2", "--svg", str(drawing))
    done = command(server, "measure", "identity", *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["over"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["http", "grpc", "region", "lane"]
    for row in rows.values():
        assert (row["requests"], row["failed"], row["error"]) == (20, 0, "")
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert rows["region"]["copied_bytes"] == rows["lane"]["copied_bytes"] == "0"
    assert drawing.read_text().count("<polyline") == 8
    again = command(server, "measure", "noop", "--requests", "3", "--over", "lane")
    assert again.stdout.splitlines()[0].split()[:3] == ["over", "requests", "failed"]


def test_what_cannot_be_measured_is_told(server: Server) -> None:
    done = command(server, "measure", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shmserve: nothing: ")
    assert done.stderr.count("\n") == 1
    done = command(server, "measure", "repeat_int32", "--over", "http")
    assert done.returncode == 1
    assert "decoupled" in done.stdout


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
