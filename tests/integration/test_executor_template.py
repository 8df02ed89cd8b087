"""Executors as forks of one template process: their parents, and what forks do not share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_files import model_maker
from tests.running_server import is_running, wait_until
from tests.servers import Server

MODEL = """
import os
import sys

import numpy as np


class Model:
    def __init__(self, context):
        a = np.ones((300, 300))
        self.threads = float((a @ a)[0, 0])  # the BLAS of a fork works

    def infer(self, request):
        if request.input("IN")[0]:
            nothing = os.path.samestat(os.fstat(0), os.stat(os.devnull)) and not sys.stdin.read()
            return {"OUT": np.array([nothing] * 4, np.float64)}
        return {"OUT": np.array([os.getpid(), os.getppid(), self.threads, np.random.random()])}
"""

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP64 dims: [4] }
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in ("one", "other"):
        model_maker(tmp_path)(MODEL, CONFIG, name)
    with Server(tmp_path, grpc_processes=0) as server:
        yield server


def ask(server: Server, model: str, stdin: bool = False) -> list[float]:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [int(stdin)]}]}
    status, answer = server.infer(model, body)
    assert status == 200, answer
    return list(answer["outputs"][0]["data"])


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_forked_executors_are_the_supervisors_children_and_draw_numbers_of_their_own(
    server: Server,
) -> None:
    one, other = ask(server, "one"), ask(server, "other")
    (supervisor,), (template,) = server.pids("supervisor"), server.pids("template")
    assert one[1] == other[1] == supervisor == parent(template)
    assert one[2] == other[2] == 300.0
    assert one[3] != other[3]
    assert ask(server, "one", stdin=True) == [1.0] * 4
    for pid in (int(one[0]), int(other[0])):
        assert os.getpgid(pid) == pid
        # Executors have mapped the template's files, so they have not been exec'ed
        command = Path(f"/proc/{template}/maps").read_text().splitlines()[0]
        assert Path(f"/proc/{pid}/maps").read_text().splitlines()[0] == command


def test_a_killed_template_costs_nobody_anything_and_comes_back(server: Server) -> None:
    (template,) = server.pids("template")
    before = int(ask(server, "one")[0])
    os.kill(template, signal.SIGKILL)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: template not in server.pids("template") and server.ready(), "another")
    wait_until(lambda: len(server.pids("template")) == 1, "the template is back")
    server.wait_instances()
    after = ask(server, "one")
    assert after[0] != before
    assert after[1] == server.pids("supervisor")[0]
    server.wait_log("reason=signal SIGKILL")  # the end of a fork is known as a child's is


def test_a_stopped_template_does_not_keep_executors_from_being_started(server: Server) -> None:
    (template,), supervisor = server.pids("template"), server.pids("supervisor")
    os.kill(template, signal.SIGSTOP)
    before = int(ask(server, "one")[0])
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: server.pids("executor one") not in ([], [before]), "another executor")
    server.wait_instances()
    assert ask(server, "one")[0] != before
    assert ask(server, "one", stdin=True) == [1.0] * 4
    wait_until(lambda: server.pids("template") not in ([], [template]), "another template")
    assert server.pids("supervisor") == supervisor


def test_what_models_leave_behind_is_reaped(server: Server, tmp_path: Path) -> None:
    """Orphans become children of the supervisor, which must leave no zombies."""
    (supervisor,) = server.pids("supervisor")
    pid = int(ask(server, "one")[0])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pids("executor one") not in ([], [pid]), "another executor")

    def zombies() -> list[str]:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return [pid for pid in children if not is_running(int(pid))]

    wait_until(lambda: not zombies(), "zombies are left")
