"""Load, unload, index and polling against real processes, and their results after deaths."""

import base64
import http.client
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.transport import rundir
from tests.crash.reload import changed
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import Server, only

MODELS = ROOT / "tests/repositories/basic"
SLOW = """
import os
import time
import numpy as np

class Model:
    def __init__(self, context):
        while os.path.exists("HOLD"):
            time.sleep(0.01)

    def infer(self, request):
        source = request.input("IN")
        np.copyto(request.output("OUT", source.shape), source)
"""
ADDS = """
class Model:
    def __init__(self, context):
        pass

    def infer(self, request):
        return {"OUT": request.input("IN") + PLUS}
"""
REQUEST = {"inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """File that delays the load of the model `slow` while the file exists."""
    return tmp_path / "hold"


@pytest.fixture
def repository(tmp_path: Path, hold: Path) -> Path:
    folder = tmp_path / "models"
    for name in ("echo", "slow"):
        shutil.copytree(MODELS / "echo", folder / name)
    (folder / "slow/1/model.py").write_text(SLOW.replace("HOLD", str(hold)))
    return folder


@pytest.fixture
def server(repository: Path) -> Iterator[RunningServer]:
    with Server(repository, **only("echo,slow"), grpc_processes=0) as server:
        yield server
    assert not os.path.exists(rundir.overrides(server.run_dir))


def index(server: RunningServer, **fields: Any) -> dict[str, dict[str, Any]]:
    """The index, by name and version."""
    return {f"{row['name']}/{row.get('version', '')}": row for row in server.index(**fields)}


def answer(server: RunningServer, model: str = "echo") -> Any:
    status, document = server.infer(model, REQUEST)
    return document["outputs"][0]["data"] if status == 200 else (status, document["error"])


def adds(plus: int) -> str:
    return base64.b64encode(ADDS.replace("PLUS", str(plus)).encode()).decode()


def executors(server: RunningServer, model: str) -> dict[str, int]:
    return {r["instance"]: r["pid"] for r in server.show("models") if r["model"] == model}


def heard(server: RunningServer, model: str) -> int:
    """Return the number of executors of a model that the coordinator is connected to."""
    rows = server.show("processes")
    return sum(row["instance"].startswith(f"{model}/") for row in rows)


def kill(server: RunningServer, role: str) -> None:
    pid = rundir.lock(server.run_dir, role).holder()
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rundir.lock(server.run_dir, role).holder() not in (None, pid), f"a {role}")


def test_versions_come_and_go_with_their_folders(server: RunningServer, repository: Path) -> None:
    config = (repository / "echo/config.pbtxt").read_text()
    (repository / "echo/config.pbtxt").write_text(config + "\nversion_policy { all {} }")
    shutil.copytree(repository / "echo/1", repository / "echo/3")
    (repository / "echo/3/model.py").write_text(ADDS.replace("PLUS", "3"))
    assert server.control("load", "echo") == (200, None)
    assert {k for k in index(server) if k.startswith("echo/")} == {"echo/1", "echo/3"}
    assert answer(server) == [4, 5], "the newest version answers"
    shutil.copytree(repository / "echo/1", repository / "echo/5")
    (repository / "echo/5/model.py").write_text("import nothing_of_that_name")
    status, refusal = server.control("load", "echo")
    assert status == 400
    assert "load failed for model 'echo'" in refusal["error"]
    assert "nothing_of_that_name" in refusal["error"]
    assert answer(server) == [4, 5], "what served goes on"
    assert server.ready()
    assert index(server)["echo/5"]["state"] == "UNAVAILABLE"
    assert index(server)["echo/3"]["state"] == "READY"
    shutil.rmtree(repository / "echo/5")
    shutil.rmtree(repository / "echo/3")
    assert server.control("load", "echo") == (200, None)
    assert {k for k in index(server) if k.startswith("echo/")} == {"echo/1"}
    assert answer(server) == [1, 2]


def test_a_model_is_made_of_the_files_of_the_request_and_nothing_else(
    server: RunningServer,
) -> None:
    config = changed(1)
    for plus in (10, 20):
        made = {"config": config, "file:7/model.py": adds(plus)}
        assert server.control("load", "echo", **made) == (200, None)
        assert answer(server) == [1 + plus, 2 + plus]
    assert {k for k in index(server) if k.startswith("echo/")} == {"echo/7"}
    overrides = Path(rundir.overrides(server.run_dir))
    assert overrides.stat().st_mode & 0o077 == 0
    wait_until(lambda: len(list(overrides.iterdir())) == 1, "the files replaced are removed")
    bad = server.control("load", "echo", config=config, **{"file:7/model.py": "bm8gbW9kZWw="})
    assert bad[0] == 400
    assert str(server.run_dir) not in bad[1]["error"]
    assert answer(server) == [21, 22]
    wait_until(lambda: len(list(overrides.iterdir())) == 1, "refused files are removed")
    kill(server, "coordinator")
    wait_until(lambda: heard(server, "echo") == 1, "its successor")
    assert answer(server) == [21, 22]
    os.kill(next(iter(executors(server, "echo").values())), signal.SIGKILL)
    wait_until(lambda: answer(server) == [21, 22], "an executor of the same files")
    assert server.control("unload", "echo") == (200, None)
    assert server.control("load", "echo") == (200, None)
    assert answer(server) == [1, 2]
    wait_until(lambda: not list(overrides.iterdir()), "no overrides are left")


def test_loading_an_unknown_model_is_a_404(server: RunningServer) -> None:
    status, told = server.control("load", "nosuch")
    assert status == 404
    assert told["error"].startswith("failed to load 'nosuch', failed to poll from model repository")


def test_loading_what_is_loaded_already_changes_nothing(server: RunningServer) -> None:
    before = executors(server, "echo")
    assert server.control("load", "echo") == (200, None)
    assert executors(server, "echo") == before
    assert server.control("load", "echo", config=changed(1)) == (200, None)
    assert executors(server, "echo").keys() != before.keys()


def test_requests_of_one_model_are_done_in_turn_and_of_others_meanwhile(
    server: RunningServer, hold: Path
) -> None:
    done: list[str] = []

    def ask(label: str, model: str, action: str, **config: str) -> threading.Thread:
        def work() -> None:
            assert server.control(action, model, **config) == (200, None)
            done.append(label)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    hold.touch()
    slow = ask("slow", "slow", "load", config=changed(1))
    wait_until(lambda: len(executors(server, "slow")) == 2, "the load of the slow model")
    after = ask("after", "slow", "unload")
    quick = ask("quick", "echo", "load", config=changed(1))
    quick.join(60)
    assert done == ["quick"]
    hold.unlink()
    for thread in (slow, after):
        thread.join(60)
    assert done[0] == "quick"
    assert sorted(done[1:]) == ["after", "slow"]  # in any order, because two threads compete
    assert index(server)["slow/1"] == {
        "name": "slow",
        "version": "1",
        "state": "UNAVAILABLE",
        "reason": "unloaded",
    }
    assert answer(server, "slow")[0] == 404
    assert server.ready(), "an unloaded model does not count"


@pytest.mark.parametrize("role", ["coordinator", "supervisor"])
def test_a_load_survives_the_death_of(role: str, server: RunningServer, hold: Path) -> None:
    assert server.control("unload", "echo") == (200, None)
    hold.touch()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.control("load", "slow", config=changed(1)))
    )
    thread.start()
    wait_until(lambda: len(executors(server, "slow")) == 2, "the load")
    kill(server, role)
    assert answer(server, "slow") == [1, 2], "what served goes on"
    wait_until(lambda: heard(server, "slow") == 2, "both executors say hello again")
    hold.unlink()
    thread.join(60)
    assert answers == [(200, None)]
    assert "turn" in server.get("/v2/models/slow/config")[1]["parameters"]
    wait_until(lambda: len(server.pids("executor slow")) == 1, "one revision")
    assert index(server)["echo/1"]["reason"] == "unloaded"
    assert server.pids("executor echo") == []
    assert answer(server, "slow") == [1, 2]


def test_a_client_that_goes_away_does_not_cancel_its_load(
    server: RunningServer, hold: Path
) -> None:
    hold.touch()
    body = json.dumps({"parameters": {"config": changed(1)}}).encode()
    client = http.client.HTTPConnection(server.http_host, server.http_port)
    client.request("POST", "/v2/repository/models/slow/load", body)
    wait_until(lambda: len(executors(server, "slow")) == 2, "the load")
    client.close()
    hold.unlink()
    wait_until(
        lambda: "turn" in server.get("/v2/models/slow/config")[1].get("parameters", {}), "the load"
    )


def test_a_polled_repository_is_followed(repository: Path) -> None:
    shutil.rmtree(repository / "slow")
    with Server(repository, model_control="poll", poll_interval_s=0.1, grpc_processes=0) as server:
        status, refusal = server.control("load", "echo")
        assert status == 503
        assert "not allowed if polling" in refusal["error"]
        rewrite(repository / "echo/1/model.py", ADDS.replace("PLUS", "5"))
        wait_until(lambda: answer(server) == [6, 7], "the changed model")
        shutil.copytree(MODELS / "pair", repository / "pair")
        wait_until(lambda: "pair/1" in index(server, ready=True), "the new model")
        rewrite(repository / "echo/config.pbtxt", "no configuration")
        server.wait_log("the old model serves on model=echo")
        assert answer(server) == [6, 7], "a change for the worse changes nothing"
        shutil.rmtree(repository / "pair")
        wait_until(lambda: not any(k.startswith("pair/") for k in index(server)), "its end")
        assert server.ready()
        wait_until(lambda: server.pids("executor pair") == [], "its processes")


def rewrite(path: Path, text: str) -> None:
    """Replace a file atomically, so that no reader sees a part of the new text."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_without_model_control_nothing_changes(repository: Path) -> None:
    with Server(repository, grpc_processes=0) as server:
        assert server.control("unload", "echo")[0] == 503
        assert server.control("load", "echo")[0] == 503
        assert set(index(server)) == {"echo/1", "slow/1"}
