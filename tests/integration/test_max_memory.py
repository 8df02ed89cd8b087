"""Models with more memory than the parameter `max_memory` allows."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import SMALL, Server, only, run_shmserve

ECHO = ROOT / "tests/repositories/basic/echo"
BOUND = ' parameters { key: "max_memory" value { string_value: "96MiB" } }'
REASON = "the model used more than its max_memory of 96MiB: "
REQUEST = {"inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
# Leaks 8 MiB for each request while `leak-PID` exists, and does not load while `hold` exists.
LEAKY = """
import os
import time
from pathlib import Path
import numpy as np

FOLDER = Path("FOLDER")
kept = [bytearray(b"x" * AT_START)]

class Model:
    def __init__(self, context):
        while (FOLDER / "hold").exists():
            time.sleep(0.01)

    def infer(self, request):
        if (FOLDER / f"leak-{os.getpid()}").exists():
            kept.append(bytearray(b"x" * (8 << 20)))
        source = request.input("IN")
        np.copyto(request.output("OUT", source.shape), source)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name in ("echo", "leaky"):
        shutil.copytree(ECHO, folder / name)
    write(folder)
    return folder


def write(repository: Path, at_start: int = 0, bound: str = BOUND, count: int = 1) -> None:
    model = repository / "leaky"
    source = LEAKY.replace("AT_START", str(at_start))
    source = source.replace('"FOLDER"', f'"{repository.parent}"')
    (model / "1/model.py").write_text(source)
    config = (ECHO / "config.pbtxt").read_text().replace("count: 1", f"count: {count}")
    (model / "config.pbtxt").write_text(config + bound)


def rows(server: RunningServer) -> list[dict[str, Any]]:
    return [row for row in server.show("models") if row["model"] == "leaky"]


def row_of(server: RunningServer) -> dict[str, Any]:
    [row] = server.index()[1:]
    assert row["name"] == "leaky"
    return row


@contextmanager
def asked_all_the_while(server: RunningServer, model: str) -> Iterator[None]:
    """Have another client ask a model, which must answer each time."""
    done, statuses = threading.Event(), []

    def ask() -> None:
        while not done.wait(0.02):
            statuses.append(server.infer(model, REQUEST)[0])

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        done.set()
        client.join()
    assert set(statuses) == {200}


def test_a_leaking_model_ends_at_its_bound_and_comes_back(repository: Path, tmp_path: Path) -> None:
    with Server(repository, **only("echo,leaky"), **SMALL) as server:
        ((pid),) = (row["pid"] for row in rows(server))
        (tmp_path / f"leak-{pid}").touch()
        statuses = []

        def ended() -> bool:
            statuses.append(server.infer("leaky", REQUEST)[0])
            return rows(server)[0]["instance_state"] != "READY"

        with asked_all_the_while(server, "echo"):
            (tmp_path / "hold").touch()
            wait_until(ended, "the end of the executor")
            assert statuses[:5] == [200] * 5, "32 MiB more are allowed"
            assert set(statuses) <= {200, 502, 503}, "503: the executor was stopped before"
            wait_until(lambda: rows(server)[0]["instance_state"] == "LOADING", "another executor")
            assert rows(server)[0]["reason"].startswith(REASON)
            assert row_of(server)["reason"].startswith(REASON)
            (tmp_path / "hold").unlink()
            wait_until(lambda: rows(server)[0]["instance_state"] == "READY", "readiness")
        assert server.infer("leaky", REQUEST)[0] == 200
        (row,) = rows(server)
        assert (row["exits"], row["reason"], row["pid"] == pid) == (1, "", False)
        server.wait_log(f"stopping instance=leaky/1/0 pid={pid} reason={REASON}")
        events = run_shmserve("show", "events", "--json", environ=server.environ).stdout
        assert REASON in str(events)


def test_of_two_instances_only_the_leaking_one_ends(repository: Path, tmp_path: Path) -> None:
    write(repository, count=2)
    with Server(repository, **only("echo,leaky"), **SMALL) as server:
        before = {row["instance"]: row["pid"] for row in rows(server)}
        (tmp_path / f"leak-{before['leaky/1/0']}").touch()

        def replaced() -> bool:
            assert server.infer("leaky", REQUEST)[0] in (200, 502)
            return all(
                row["instance_state"] == "READY"
                and (row["pid"] == before[row["instance"]]) == (row["instance"] == "leaky/1/1")
                for row in rows(server)
            )

        wait_until(replaced, "another executor of instance 0")
        assert [row["exits"] for row in rows(server)] == [1, 0]


def test_a_model_over_its_bound_fails_to_load(repository: Path) -> None:
    with Server(repository, **only("echo"), **SMALL) as server:
        write(repository, at_start=128 << 20)
        status, answer = server.control("load", "leaky")
        assert status == 400
        assert f"load failed for model 'leaky': version 1: {REASON}" in answer["error"]
        assert row_of(server)["state"] == "UNAVAILABLE"
        assert REASON in row_of(server)["reason"]
        write(repository)
        assert server.control("load", "leaky") == (200, None)
        write(repository, at_start=128 << 20)
        assert server.control("load", "leaky")[0] == 400
        assert server.infer("leaky", REQUEST)[0] == 200, "what served goes on"
        write(repository, bound=BOUND.replace("96MiB", "lots"))
        status, answer = server.control("load", "leaky")
        assert status == 400
        assert "parameters.max_memory is 'lots', not a size in bytes or with a" in answer["error"]
        environ = {**server.environ, "SHMSERVE_LOAD_MODELS": "echo,leaky"}
        check = run_shmserve("check", environ=environ)
        assert "parameters.max_memory is 'lots'" in check.stdout
        assert server.infer("echo", REQUEST)[0] == 200
