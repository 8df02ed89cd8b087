"""When a gRPC process may listen: messages of the supervisor, and the supervisor's end."""

import os
import threading

import pytest

from shmserve.frontends.grpc.process.__main__ import _await_turn


@pytest.mark.parametrize(
    ("said", "stopped", "listens"),
    [(b"\0", False, True), (b"", False, False), (b"\0", True, False)],
    ids=["told to", "supervisor gone", "to end"],
)
def test_it_listens_when_it_is_told_to_and_never_because_somebody_is_gone(said, stopped, listens):
    reading, writing = os.pipe()
    if said:
        os.write(writing, said)
    os.close(writing)
    stop = threading.Event()
    if stopped:
        stop.set()
    assert _await_turn(reading, stop) is listens


def test_it_ends_while_it_waits() -> None:
    reading, writing = os.pipe()
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert not _await_turn(reading, stop)
    os.close(writing)
