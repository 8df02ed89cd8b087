"""When a new generation may serve, and the messages to the predecessor."""

import os
from math import inf

import msgspec
import pytest

from shmserve.core.registry import Snapshot
from shmserve.shm.registry_page import RegistryWriter
from shmserve.supervisor.generations.takeover import LoadingWatch, TakeOver
from shmserve.transport import rundir
from tests.unit.supervisor.snapshots import LOADING, READY, UNAVAILABLE, snapshot


class Generation:
    """A new generation; `heard`: messages to the predecessor."""

    def __init__(self, run_dir: str, until: float = inf) -> None:
        self.writer = RegistryWriter(run_dir, "e1")
        self.reading, writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.side = TakeOver(writing, LoadingWatch(run_dir, until))
        self.listening = False

    def turn(self, found: Snapshot | None = None) -> str:
        if found is not None:
            self.writer.publish(found)
        return self.side.turn(lambda: self.listening)

    def heard(self) -> str:
        try:
            return os.read(self.reading, 100).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def generation(tmp_path):
    made = Generation(str(tmp_path))
    yield made
    made.writer.close()
    os.close(made.reading)
    for fd in (made.side.turn_fd, made.side._report, made.side._holding):
        if fd >= 0:
            os.close(fd)


def test_it_serves_when_all_models_are_ready_and_grpc_listens(generation: Generation) -> None:
    assert generation.turn() == ""
    assert generation.turn(snapshot(complete=False)) == ""
    assert generation.turn(snapshot(a=READY, b=LOADING)) == ""
    assert not generation.side.may_listen
    assert generation.turn(snapshot(a=READY, b=READY)) == ""
    assert generation.side.may_listen
    assert generation.heard() == ""
    generation.listening = True
    assert generation.turn() == ""
    assert generation.heard() == rundir.SERVES
    assert not generation.side.pending


def test_it_does_not_take_over_while_models_load_that_it_could_do_without(generation) -> None:
    generation.listening = True
    partly = msgspec.structs.replace(snapshot(a=READY, b=LOADING), requires=("any",))
    generation.turn(partly)
    assert partly.ready
    assert generation.heard() == ""


def test_a_model_that_cannot_be_loaded_is_told_and_ends_it(generation: Generation) -> None:
    assert generation.turn(snapshot(a=READY, b=UNAVAILABLE)) == "b/1: why"
    assert generation.heard() == "b/1: why"
    assert generation.turn() == ""
    assert not generation.side.may_listen
    assert not generation.side.pending


def test_a_shortage_of_memory_is_told(generation: Generation) -> None:
    short = msgspec.structs.replace(snapshot(a=READY), shortage="too small")
    assert generation.turn(short) == "too small"


def test_it_ends_with_whoever_waits_for_it(tmp_path) -> None:
    generation = Generation(str(tmp_path))
    os.close(generation.reading)
    assert generation.turn() == "the reload has been given up"
    assert generation.turn() == ""
    assert not generation.side.may_listen
    generation.writer.close()


def test_clients_wait_for_models_that_load_and_for_no_others(tmp_path) -> None:
    writer = RegistryWriter(str(tmp_path), "e1")
    waits = LoadingWatch(str(tmp_path), inf)
    assert not waits.settled()
    for found, settled in (
        (snapshot(complete=False), False),
        (snapshot(a=LOADING, b=UNAVAILABLE), False),
        (snapshot(a=READY, b=UNAVAILABLE), True),
        (snapshot(a=READY), True),
    ):
        writer.publish(found)
        assert waits.settled() is settled
    writer.publish(snapshot(a=LOADING))
    assert LoadingWatch(str(tmp_path), 0.0).settled(), "not for ever"
    writer.close()


def test_grpc_listens_at_once_where_nobody_waits(tmp_path) -> None:
    side = TakeOver(-1, LoadingWatch(str(tmp_path), 0.0))
    assert side.turn(lambda: True) == ""
    assert side.may_listen
    assert not side.pending


def test_grpc_that_cannot_be_served_is_told(generation: Generation) -> None:
    why = "gRPC cannot be served: status 1"
    assert generation.side.turn(lambda: False, why) == why
    assert generation.heard() == why
    assert generation.turn(snapshot(a=READY)) == ""
    assert not generation.side.may_listen
