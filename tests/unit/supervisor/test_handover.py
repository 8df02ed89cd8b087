"""Reports of a handover about a new generation, or about the reason of a failure."""

import os
from collections.abc import Callable

import pytest

from shmserve.config import COMMAND_VARIABLE, Settings
from shmserve.supervisor.generations import handover
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import pidfd_open

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
        assert handover._await(reading, alive, old(alive, stopping), Notifier("")) == said
    os.close(alive)
    os.close(stopping)


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
