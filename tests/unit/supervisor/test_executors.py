"""Pauses between starts of executors, with other programs instead."""

import subprocess
from collections.abc import Iterator

import pytest

from shmserve.protocol.control.link_messages import Instance
from shmserve.supervisor.processes.executors import Executors
from shmserve.tensor.spec import ModelSpec

LEAKS = Instance("m/1/0", ModelSpec("m", "1", "", "python", 0, (), ()), "/x")


class Template:
    """Starts waiting programs."""

    def is_coming(self, now):
        return False

    def fork(self, process, data):
        return subprocess.Popen(["sleep", "60"], start_new_session=True)


@pytest.fixture
def executors(tmp_path) -> Iterator[Executors]:
    made = Executors(str(tmp_path), [], 0, lambda message: None, lambda child: None, Template())  # type: ignore[arg-type]
    yield made
    for child in list(made.children.values()):
        child.kill()
        child.reap()


def stop(executors: Executors, now: float, hurry: tuple[str, ...] = (LEAKS.name,)) -> None:
    child = executors.children[LEAKS.name]
    executors.desire([], now, hurry)
    assert child.popen is not None
    child.popen.wait(60)
    executors.ended(child, now + 0.5)


def test_an_executor_that_was_stopped_starts_again_with_pauses_as_after_a_death(executors) -> None:
    executors.desire([LEAKS], 0.0)
    stop(executors, 1.0)
    executors.desire([LEAKS], 2.0)
    assert LEAKS.name in executors.children, "at once the first time"
    stop(executors, 3.0)
    executors.desire([], 3.6, [LEAKS.name])  # about something else, before the end is known
    executors.desire([LEAKS], 3.7)
    assert (executors.children, executors.next_due()) == ({}, 4.0)
    executors.turn(4.0)
    stop(executors, 20.0)
    executors.desire([LEAKS], 21.0)
    assert LEAKS.name in executors.children, "at once after a long run"


def test_an_executor_of_an_unloaded_model_has_no_pause(executors) -> None:
    executors.desire([LEAKS], 0.0)
    for now in (1.0, 3.0):
        stop(executors, now, hurry=())
        executors.desire([LEAKS], now + 1)
        assert LEAKS.name in executors.children
