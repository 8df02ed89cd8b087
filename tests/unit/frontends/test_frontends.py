"""Frontend processes under the supervisor's care, with stand-ins that only hold their lock."""

import os
import select
import signal
import sys
import time
from contextlib import closing
from math import inf
from pathlib import Path

import pytest

from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.frontends import Frontends
from shmserve.transport import rundir
from shmserve.transport.processes import pidfd_open
from tests.running_server import wait_until

STAND_IN = """
import os, sys, time
from shmserve.transport import rundir
number = sys.argv[sys.argv.index("--number") + 1]
if os.path.exists("fail"):
    sys.exit(1)
if not rundir.lock(".", f"web-{number}").acquire():
    sys.exit(0)
while os.path.exists("."):
    time.sleep(0.05)
"""


class Keeper:
    """`Frontends` with a watcher for ended processes, like the supervisor's."""

    def __init__(self, folder: Path, count: int) -> None:
        self.master = pidfd_open(os.getpid())
        command = [sys.executable, "-c", STAND_IN]
        self.frontends = Frontends(str(folder), "web", command, count, self.master)
        self.now = time.monotonic()

    def turn(self) -> list[Child]:
        for child in self.frontends.children:
            poll = select.poll()
            poll.register(child.pidfd, select.POLLIN)
            if poll.poll(0):
                assert self.frontends.ended(child, self.now)
        return self.frontends.turn(self.now)

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.frontends.children}

    def close(self) -> None:
        self.frontends.halt()
        for child in self.frontends.children:
            child.kill()
            self.frontends.ended(child, self.now)
        os.close(self.master)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path


@pytest.fixture
def keeper(folder):
    with closing(Keeper(folder, 2)) as keeper:
        yield keeper


def holds(folder: Path, number: int) -> int | None:
    return rundir.lock(str(folder), f"web-{number}").holder()


def test_as_many_as_there_should_be_and_killed_ones_again_at_once(keeper, folder) -> None:
    assert len(keeper.turn()) == 2
    assert keeper.turn() == []
    before = keeper.pids()
    wait_until(lambda: holds(folder, 0) == before["web 0"], "the first has its lock")
    os.kill(before["web 0"], signal.SIGKILL)
    new: list[Child] = []
    wait_until(lambda: bool(new.extend(keeper.turn()) or new), "another")
    after = keeper.pids()
    assert after["web 1"] == before["web 1"]
    assert after["web 0"] != before["web 0"]


def test_one_that_cannot_start_is_not_tried_again_and_again(keeper: Keeper, folder: Path) -> None:
    (folder / "fail").touch()
    keeper.turn()
    wait_until(lambda: not keeper.turn() and not keeper.pids(), "both have ended")
    pauses = []
    for _ in range(4):
        due = keeper.frontends.next_due()
        pauses.append(due - keeper.now)
        keeper.now = due
        wait_until(lambda: bool(keeper.turn()), "another try")
        wait_until(lambda: not keeper.turn() and not keeper.pids(), "its end")
    assert pauses == sorted(pauses)
    assert pauses[0] > 0
    assert pauses[-1] > pauses[0]


def test_a_successor_adopts(keeper: Keeper, folder: Path) -> None:
    keeper.turn()
    pids = keeper.pids()
    wait_until(lambda: {holds(folder, 0), holds(folder, 1)} == set(pids.values()), "their locks")
    with closing(Keeper(folder, 2)) as successor:
        assert len(successor.turn()) == 2
        assert successor.pids() == pids
        os.kill(pids["web 1"], signal.SIGKILL)  # not a child of this process
        wait_until(lambda: bool(successor.turn()), "another")
        assert successor.pids()["web 0"] == pids["web 0"]


def test_none_are_started_after_a_halt(keeper: Keeper) -> None:
    keeper.frontends.halt()
    assert keeper.turn() == []
    assert keeper.frontends.next_due() == inf
