"""Questions over a link: answers with fds, coordinators that die in between."""

import os

import pytest

from shmserve.errors import ProtocolViolation, Unavailable
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import AskStats, LoadFailed, Stats
from shmserve.protocol.control.region_messages import (
    NeedRegion,
    RegionAnswer,
    RegionGiven,
    StoredRegions,
    StoreRegions,
    UnregisterRegions,
)
from shmserve.transport.link import Link
from tests.running_server import wait_until
from tests.unit.transport.test_link import Coordinator, handlers, in_thread


@pytest.fixture
def coordinator(tmp_path):
    coordinator = Coordinator(str(tmp_path))
    yield coordinator
    coordinator.close()


@pytest.fixture
def link(tmp_path, coordinator):
    stored = []
    told = handlers(on_fds=lambda message, fds: stored.append((message, fds)))
    link = Link(str(tmp_path), "executor", "executor-1-aa", told)
    link.stored = stored  # type: ignore[attr-defined]
    link.start()
    coordinator.accept()
    wait_until(lambda: link.connected, "the link")
    yield link
    link.close()


def test_an_answer_brings_its_fd(link, coordinator):
    thread, results = in_thread(lambda: link.ask(lambda ticket, _: NeedRegion(ticket, 5), 30.0))
    question = coordinator.receive()
    read, write = os.pipe()
    coordinator.channel.send(messages.encode(RegionGiven(question.ticket)), [write])
    thread.join(30)
    [(answer, [fd])] = results
    assert answer == RegionGiven(question.ticket)
    os.write(fd, b"x")
    assert os.read(read, 1) == b"x"
    for end in (fd, read, write):
        os.close(end)


def test_questions_are_asked_again(link, coordinator):
    def make(ticket, again):
        return UnregisterRegions(ticket, "again" if again else "first", 0)

    thread, results = in_thread(lambda: link.ask(make, 30.0))
    assert coordinator.receive().name == "first"
    coordinator.channel.close()
    coordinator.accept()
    question = coordinator.receive()
    assert question.name == "again"
    coordinator.send(RegionAnswer(question.ticket))
    thread.join(30)
    assert results[0][0].error_code == ""


def test_late_answers_leave_nothing_open(link, coordinator):
    with pytest.raises(Unavailable, match="did not answer within"):
        link.ask(lambda ticket, _: NeedRegion(ticket, 5), 0.05)
    question = coordinator.receive()
    read, write = os.pipe()
    coordinator.channel.send(messages.encode(RegionGiven(question.ticket)), [write])
    coordinator.send(AskStats(1, "x"))
    coordinator.receive()
    assert nobody_else_has(read, write)


def test_what_is_too_long_to_ask_is_refused_and_never_asked_again(link, coordinator):
    with pytest.raises(ProtocolViolation, match="too long"):
        link.ask(lambda ticket, _: UnregisterRegions(ticket, "x" * 200_000, 0), 30.0)
    coordinator.channel.close()
    coordinator.accept()
    coordinator.send(AskStats(1, "x"))
    assert coordinator.receive() == Stats(1, {})


def test_fds_go_both_ways(link, coordinator):
    read, write = os.pipe()
    link.send(StoredRegions((7,)), [write])
    data, [fd] = coordinator.channel.receive(30.0)
    assert messages.decode_to_coordinator(data) == StoredRegions((7,))
    coordinator.channel.send(messages.encode(StoreRegions((8,))), [fd])
    wait_until(lambda: link.stored, "the fd")
    message, [back] = link.stored[0]
    assert message == StoreRegions((8,))
    for end in (read, write, fd, back):
        os.close(end)


def test_fds_for_a_dead_coordinator_are_closed(link, coordinator):
    coordinator.go_away()
    wait_until(lambda: not link.connected, "the end")
    read, write = os.pipe()
    link.send(StoredRegions((7,)), [write])
    assert nobody_else_has(read, write)


def test_what_one_coordinator_was_not_told_of_fds_is_not_told_to_the_next(tmp_path, coordinator):
    read, write = os.pipe()

    def hand_over(message):
        if welcomes:
            link.send(LoadFailed("m/1/0", "of the second"))
        else:
            coordinator.channel.close()  # the coordinator dies before reading any message
            link.send(StoredRegions((7,), True), [write])
            link.send(StoredRegions((), False))
        welcomes.append(message)

    welcomes = []
    link = Link(str(tmp_path), "supervisor", "supervisor-1-aa", handlers(on_message=hand_over))
    link.start()
    coordinator.accept()
    coordinator.accept()
    assert coordinator.receive() == LoadFailed("m/1/0", "of the second")
    assert nobody_else_has(read, write)
    link.close()


def nobody_else_has(read, write):
    """Return whether these were the only descriptors of a pipe's ends; close both ends."""
    os.close(write)
    os.set_blocking(read, False)
    try:
        return os.read(read, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(read)
