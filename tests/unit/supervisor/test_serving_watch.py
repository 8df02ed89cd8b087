"""Reports to the coordinator about gRPC processes that serve, fail to serve, or are late."""

import os
import sys
import time
from pathlib import Path

import pytest

from shmserve.protocol.control.link_messages import Exited, Started
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.frontends import Frontends
from shmserve.supervisor.processes.serving_watch import ServingWatch
from shmserve.transport.processes import has_ended, pidfd_open
from tests.running_server import wait_until

# Takes its lock, as a process that listens does, ends with status 3, or does neither.
PROGRAM = """
import sys, time
from shmserve.transport import rundir
run_dir, what, _, number = sys.argv[1:5]
lock = rundir.lock(run_dir, f"grpc-{number}")
path, what = what, ""
while not what:  # the test is just writing
    what = open(path).read()
if what == "fail":
    sys.exit(3)
if what == "serve":
    lock.acquire()
time.sleep(600)
"""
STATUS = "grpc 0 ended with status 3"


class Service:
    """The supervisor's part; `heard`: messages to the coordinator; `later_s`: seconds added to
    real time."""

    def __init__(
        self, folder: Path, what: str, count: int = 1, begins: bool = True, waits: bool = False
    ) -> None:
        self.what = folder / "what"
        self.what.write_text(what)
        self.master_fd = pidfd_open(os.getpid()) or -1
        command = [sys.executable, "-c", PROGRAM, str(folder), str(self.what)]
        self.frontends = Frontends(str(folder), "grpc", command, count, self.master_fd)
        self.heard: list[Started | Exited] = []
        self.watch = ServingWatch(self.frontends, self.heard.append, begins, waits)
        self.children: list[Child] = []
        self.may_listen = not waits
        self.later_s = 0.0

    def turn(self) -> str:
        now = time.monotonic() + self.later_s
        for child in [child for child in self.children if has_ended(child.pidfd)]:
            self.children.remove(child)
            self.frontends.ended(child, now)
        self.children += self.frontends.turn(now)
        return self.watch.turn(now, self.may_listen)

    def until(self, *heard: Started | Exited) -> None:
        def turned() -> bool:
            assert self.turn() == ""
            return self.heard == [*heard]

        wait_until(turned, f"{heard}; heard is {self.heard}")

    def kill(self) -> None:
        for child in self.children:
            child.kill()
            has_ended(child.pidfd, 10.0)

    def close(self) -> None:
        self.frontends.halt()
        self.kill()
        self.turn()
        os.close(self.master_fd)


@pytest.fixture
def services():
    made: list[Service] = []
    yield made
    for service in made:
        service.close()


def test_a_start_waits_for_the_first_that_listens(tmp_path, services: list[Service]) -> None:
    services.append(service := Service(tmp_path, "serve"))
    assert service.watch.reason == "no process has begun to listen yet"
    service.until(Started("grpc", 0))
    assert service.watch.reason == ""
    assert service.frontends.listening()
    service.kill()
    service.turn()
    assert not service.frontends.listening()
    wait_until(lambda: service.turn() == "" and service.frontends.listening(), "another one")
    assert service.heard == [Started("grpc", 0)], "a restart is no news"

    service.what.write_text("fail")
    service.kill()
    service.until(Started("grpc", 0), Exited("grpc", 0, STATUS))
    service.what.write_text("serve")
    service.until(Started("grpc", 0), Exited("grpc", 0, STATUS), Started("grpc", 0))
    service.watch.tell_again()
    service.until(*(Started("grpc", 0), Exited("grpc", 0, STATUS), *[Started("grpc", 0)] * 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("waits", [False, True])
def test_a_start_without_any_fails(tmp_path, services: list[Service], waits: bool) -> None:
    services.append(service := Service(tmp_path, "fail", waits=waits))
    said: list[str] = []
    wait_until(lambda: bool(said.append(service.turn()) or said[-1]), "the start has failed")
    assert said[-1] == f"gRPC cannot be served: {STATUS}, as 2 before it"
    assert service.heard == [Exited("grpc", 0, STATUS)]
    assert service.turn() == "", "said once"


def test_only_a_start_fails(tmp_path, services: list[Service]) -> None:
    services.append(service := Service(tmp_path, "fail", begins=False))
    assert service.watch.reason == ""
    service.until(Exited("grpc", 0, STATUS))
    wait_until(lambda: service.turn() == "" and service.frontends.failures > 3, "many attempts")


def test_one_that_never_listens_is_late(tmp_path, services: list[Service]) -> None:
    services.append(service := Service(tmp_path, "sleep", waits=True))
    service.turn()
    service.later_s = 60.0
    service.turn()
    assert service.heard == [], "it has not been asked to"
    service.may_listen = True
    service.turn()
    assert service.heard == []
    service.later_s = 120.0
    service.turn()
    assert service.heard == [Exited("grpc", 0, "no process has begun to listen within 15 s")]


def test_one_of_two_is_enough_and_none_may_be_wanted(tmp_path, services: list[Service]) -> None:
    services.append(service := Service(tmp_path, "serve", count=2))
    wait_until(lambda: service.turn() == "" and service.frontends.listening(), "both listen")
    service.what.write_text("fail")
    service.children[0].kill()
    wait_until(lambda: service.turn() == "" and not service.frontends.listening(), "one is left")
    service.later_s = 60.0
    service.turn()
    assert service.heard == [Started("grpc", 0)]

    services.append(none := Service(tmp_path, "serve", count=0))
    none.later_s = 60.0
    assert none.turn() == none.watch.reason == ""
    assert none.heard == []
