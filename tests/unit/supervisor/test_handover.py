"""Reports of a handover about a new generation, or about the reason of a failure."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shmserve.config import COMMAND_VARIABLE, Settings
from shmserve.supervisor.generations import generation_processes, handover
from shmserve.supervisor.generations.generation_processes import (
    GenerationProcesses,
    StoppedWatch,
)
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import pidfd_open, stat_of

Pipe = Callable[[], tuple[int, int]]


@pytest.fixture
def pipe():
    fds: list[int] = []

    def made() -> tuple[int, int]:
        fds.extend(os.pipe())
        return fds[-2], fds[-1]

    yield made
    for fd in fds:
        os.close(fd)


def old(master_fd: int, stopping_fd: int = -1, **more: object) -> handover.Old:
    given = {"http": (), "grpc_fds": (), "environ": {}, **more}
    return handover.Old(Settings(), master_fd, stopping_fd, **given)  # type: ignore[arg-type]


def awaited(
    reading: int, pidfd: int, the_old: handover.Old, processes: GenerationProcesses | None = None
) -> str:
    watched = GenerationProcesses("/nowhere", None) if processes is None else processes
    return handover._await(reading, pidfd, the_old, Notifier(""), watched)


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_service_that_stops_is_not_taken_over(pipe: Pipe) -> None:
    """The master has not ended, and the new generation could serve."""
    reading, writing = pipe()
    os.write(writing, rundir.SERVES.encode())
    alive = pidfd_open(os.getpid())
    stopping = os.eventfd(0)
    assert alive is not None
    for stops, said in ((True, "the service ends"), (False, rundir.SERVES)):
        if stops:
            os.eventfd_write(stopping, 1)
        else:
            os.eventfd_read(stopping)
        assert awaited(reading, alive, old(alive, stopping)) == said
    os.close(alive)
    os.close(stopping)


@pytest.mark.parametrize(("keeper_fd", "said"), [(1, rundir.SERVES), (-1, "the service ends")])
def test_a_new_generation_goes_on_without_the_old_master_where_a_keeper_holds_the_service(
    keeper_fd: int, said: str, pipe: Pipe
) -> None:
    reading, writing = pipe()
    stopping, alive = os.eventfd(0), pidfd_open(os.getpid())
    killed = subprocess.Popen(["sleep", "600"])
    master = pidfd_open(killed.pid)
    assert alive is not None
    assert master is not None
    killed.kill()
    killed.wait()
    report = threading.Timer(0.2, os.write, (writing, rundir.SERVES.encode()))
    report.start()
    assert awaited(reading, alive, old(master, stopping, keeper_fd=keeper_fd)) == said
    report.join()
    for fd in (stopping, alive, master):
        os.close(fd)


def test_a_stopped_process_of_the_new_generation_is_killed(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descendant, which another process would replace; here the master ends with it."""
    monkeypatch.setattr(generation_processes, "STOPPED_S", 0.0)
    (reading, writing), never = pipe(), os.eventfd(0)
    os.write(writing, rundir.SERVES.encode())  # no generation with a stopped process may serve
    script = "import subprocess; subprocess.run(['sleep', '600'])"
    master = subprocess.Popen([sys.executable, "-c", script])
    processes = GenerationProcesses(str(tmp_path), master.pid)
    pidfd = pidfd_open(master.pid)
    assert pidfd is not None
    while not (children := children_of(master.pid)):
        time.sleep(0.01)
    os.kill(children[0], signal.SIGSTOP)
    while stat_of(children[0]).state != "T":
        time.sleep(0.01)
    said = awaited(reading, pidfd, old(never, never), processes)
    assert said == "its master ended before it served; the log says more"
    assert master.wait() == 0
    assert processes.await_end(60)
    os.close(pidfd)
    os.close(never)


def test_a_generation_ends_with_every_process_that_was_ever_seen(tmp_path: Path) -> None:
    script = (
        "import os, subprocess; sleeping = subprocess.Popen(['sleep', '600'], stdout=2)\n"
        "print(sleeping.pid, flush=True); input(); os._exit(0)"
    )
    master = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert master.stdout is not None
    child = int(master.stdout.readline())
    processes = GenerationProcesses(str(tmp_path), master.pid)
    processes.look()
    master.communicate(b"\n")
    assert not processes.await_end(0.0), "the child has lost its parent, and lives"
    processes.kill()
    assert processes.await_end(60)
    stat = stat_of(child)  # another process reaps it
    assert stat is None or stat.state == "Z"


def test_a_handover_that_is_stopped_is_killed_by_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_processes, "STOPPED_S", 0.0)
    script = (
        "import sys, time; from shmserve.transport import rundir\n"
        "assert rundir.lock(sys.argv[1], 'handover').acquire(); print('x', flush=True)\n"
        "time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    handover.watch(str(tmp_path), StoppedWatch())
    assert holder.poll() is None
    holder.send_signal(signal.SIGSTOP)
    while stat_of(holder.pid).state != "T":
        time.sleep(0.01)
    handover.watch(str(tmp_path), StoppedWatch())
    assert holder.wait(60) == -signal.SIGKILL
    holder.stdout.close()


def test_what_cannot_be_started_is_told_whatever_number_the_pipe_has(pipe: Pipe) -> None:
    """Passed descriptors are renumbered from 3 on."""
    reading, writing = pipe()
    http = [("http", pipe()[1])] * (writing + 1)
    pid = handover._start(
        old(-1, http=http, environ={COMMAND_VARIABLE: "/nowhere/at-all"}), "g1", writing
    )
    os.waitpid(pid, 0)
    os.set_blocking(reading, False)
    assert os.read(reading, 100) == b"it cannot be started: No such file or directory"
