"""An executor's channels: admission, order of reading, and the cost of a slow reader."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.errors import PeerDied
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Cancel,
    Credit,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
    WireTensor,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.status_page import StatusPage
from shmserve.transport import channel as transport
from shmserve.transport.channel import MAX_MESSAGE, Channel, close_all
from tests.no_descriptors import no_descriptors
from tests.unit.rig import Unlimited, no_lanes

HELLO = FrontendHello(messages.VERSION, "http-1")
OURS = ExecutorHello(messages.VERSION, "executor-1", "m/1/0")


class Executor:
    """The channels of an executor, and the executor's frontends."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "x.sock")
        self._listener = transport.listen(self._path)
        self._status = StatusPage("cafe0123")
        self._frontends: list[Channel] = []
        self.memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
        self.channels = Channels(
            self._listener, OURS, self.memory, self._status, Mappings(), no_lanes(self.memory)
        )

    def connect(self, *first: messages.ToExecutor) -> Channel:
        """Return a frontend that has sent the messages `first`."""
        frontend = Channel.connect(self._path)
        self._frontends.append(frontend)
        for message in first:
            frontend.send(messages.encode(message))
        return frontend

    def greeted(self) -> tuple[Channel, FrontendConnection]:
        """Return a frontend whose hello was answered, and the executor's side of the
        connection."""
        frontend = self.connect(HELLO, request(0))
        ((connection, message),) = self.receive(1)
        assert message == request(0)
        assert read(frontend) == OURS
        return frontend, connection

    def receive(self, count: int) -> list[tuple[FrontendConnection, object]]:
        """So many events; no more may come."""
        events: list[tuple[FrontendConnection, object]] = []
        for _ in range(20):
            events += self.channels.receive(0.02)
            if len(events) >= count:
                break
        assert len(events + self.channels.receive(0.02)) == count
        return events

    def close(self) -> None:
        self.channels.close()
        for frontend in self._frontends:
            frontend.close()
        self._listener.close()
        self._status.close()
        self.memory.close()


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    executor = Executor(tmp_path)
    yield executor
    executor.close()


def request(number: int, sent_ns: int = 0) -> Execute:
    return Execute(number, "", (), (), {}, sent_ns, 0)


def test_requests_in_the_order_in_which_they_were_sent(executor: Executor) -> None:
    """epoll reports new connections later: they are accepted one by one, and greeted."""
    known, connection = executor.greeted()
    executor.connect(HELLO, request(1, 1))
    executor.connect(HELLO, request(2, 2))
    known.send(messages.encode(request(3, 3)))
    known.send(messages.encode(Cancel(3)))
    events = executor.channels.receive_in_order(1.0)
    assert [message for _, message in events] == [
        *(request(number, number) for number in (1, 2, 3)),
        Cancel(3),
    ]
    assert events[2][0] is events[3][0] is connection


def read(frontend: Channel) -> object:
    data, fds = frontend.receive(5.0)
    close_all(fds)
    return messages.decode_to_frontend(data)


@pytest.mark.parametrize(
    "first",
    [
        lambda frontend: frontend.send(messages.encode(request(1))),
        lambda frontend: frontend.send(messages.encode(FrontendHello(0, "http-1"))),
        lambda frontend: frontend.send(b"?"),
        lambda frontend: frontend.close(),
    ],
    ids=["no hello", "version", "unreadable", "gone"],
)
def test_who_does_not_say_hello_is_not_let_in(
    executor: Executor, first: Callable[[Channel], None]
) -> None:
    other, connection = executor.greeted()
    gc.collect()  # descriptors left by earlier tests must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    frontend = executor.connect()
    first(frontend)
    executor.receive(0)
    if frontend.fileno() >= 0:
        with pytest.raises(PeerDied):
            frontend.receive(5.0)
        frontend.close()
    assert len(os.listdir("/proc/self/fd")) == before
    other.send(messages.encode(Cancel(3)))
    assert executor.receive(1) == [(connection, Cancel(3))]


def test_first_requests_of_new_channels_are_there_at_once(executor: Executor) -> None:
    first, _ = executor.greeted()
    for number in (1, 2, 3):
        executor.connect(HELLO, request(number))
    first.send(messages.encode(request(4)))
    events = executor.channels.receive(0)
    assert sorted(message.request for _, message in events if message) == [1, 2, 3, 4]


@pytest.mark.parametrize("data", [b"?", messages.encode(HELLO)], ids=["unreadable", "hello"])
def test_a_frontend_that_breaks_the_protocol_loses_its_channel_alone(
    executor: Executor, data: bytes
) -> None:
    first, connection = executor.greeted()
    second, other = executor.greeted()
    first.send(data)
    assert executor.receive(1) == [(connection, None)]
    with pytest.raises(PeerDied):
        first.receive(5.0)
    assert other.frontend is connection.frontend
    second.send(messages.encode(Credit(1, 2)))
    assert executor.receive(1) == [(other, Credit(1, 2))]


def test_one_message_of_a_channel_is_read_unless_the_request_has_waited(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    for number in (1, 2):
        frontend.send(messages.encode(request(number, time.monotonic_ns() + 10**12)))
    assert [m.request for _, m in executor.channels.receive(1.0) if m] == [1]
    assert [m.request for _, m in executor.channels.receive(1.0) if m] == [2]
    frontend.send(messages.encode(request(3)))
    frontend.send(messages.encode(Cancel(3)))
    assert executor.channels.receive(1.0) == [(connection, request(3)), (connection, Cancel(3))]


def test_requests_of_several_frontends_come_with_one_wake_up(executor: Executor) -> None:
    frontends = [executor.greeted()[0] for _ in range(3)]
    for number, frontend in enumerate(frontends):
        frontend.send(messages.encode(request(number)))
    assert sorted(m.request for _, m in executor.channels.receive(1.0) if m) == [0, 1, 2]


def test_what_a_frontend_has_no_room_for_is_kept_until_it_has(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    answers = [Answer(number, parameters={"p": "x" * 100_000}) for number in range(8)]
    for answer in answers:
        executor.channels.send(connection, answer, [])
    assert not executor.channels.settled
    executor.channels.refuse(set())
    assert [read(frontend)]
    taken = 1
    while taken < len(answers):
        executor.channels.receive(0.02)
        assert read(frontend) == answers[taken]
        taken += 1
    executor.channels.receive(0.02)
    assert executor.channels.settled


def test_an_answer_that_is_too_long_is_told_as_an_error(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    executor.channels.send(connection, Answer(1, parameters={"p": "x" * MAX_MESSAGE}), [])
    answer = read(frontend)
    assert isinstance(answer, Answer)
    assert (answer.request, answer.parameters) == (1, {})
    assert "more than the" in answer.error


def test_slots_of_an_answer_that_nobody_gets_come_back(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    executor.greeted()  # of the same process, so the outputs stay held
    slot = executor.memory.reserve(1)
    executor.memory.seal_and_lease(slot)
    connection.frontend.hold([(slot.number, slot.generation)])
    frontend.close()
    at = executor.memory.descriptor(slot)
    output = WireTensor("OUT", "UINT8", (1,), at)
    executor.channels.send(connection, Answer(1, (output,)), [slot.segment])
    assert executor.receive(1) == [(connection, None)]
    assert executor.memory.rows("slots") == []


def test_outputs_that_a_refused_frontend_holds_stay_until_the_end(executor: Executor) -> None:
    """A refused frontend closes its channel, and until then may read outputs."""
    frontend, connection = executor.greeted()
    slot = executor.memory.reserve(4096)
    executor.memory.seal_and_lease(slot)
    connection.frontend.hold([(slot.number, slot.generation)])
    at = executor.memory.descriptor(slot)
    executor.channels.refuse(set())
    frontend.close()
    assert executor.receive(1) == [(connection, None)]
    other = executor.memory.reserve(4096)
    assert (other.segment, executor.memory.descriptor(other).offset) != (slot.segment, at.offset)
    executor.memory.reclaim(other)
    executor.channels.disconnect()
    assert executor.memory.rows("slots") == []


def test_releases_are_answered_with_what_was_freed(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    connection.frontend.freed.append((4, 1))
    frontend.send(messages.encode(Release(())))
    executor.receive(0)
    assert read(frontend) == Answer(0, freed=((4, 1),))
    assert connection.frontend.freed == []


def test_what_was_sent_before_an_end_is_taken_and_nothing_afterwards(executor: Executor) -> None:
    frontend, connection = executor.greeted()
    busy, at_work = executor.greeted()
    late = executor.connect(HELLO, request(7))  # not accepted yet
    frontend.send(messages.encode(request(5)))
    executor.channels.refuse({at_work})
    numbers = [m.request for _, m in executor.receive(2) if isinstance(m, Execute)]
    assert sorted(numbers) == [5, 7]
    for refused in (frontend, late):
        with pytest.raises(PeerDied):
            refused.send(messages.encode(request(6)))
    with pytest.raises(PeerDied):
        executor.connect(HELLO)
    busy.send(messages.encode(request(8)))  # until the connection's request is answered
    executor.channels.send(at_work, Answer(0), [])
    assert executor.receive(1) == [(at_work, request(8))]
    with pytest.raises(PeerDied):
        busy.send(messages.encode(request(9)))
    executor.channels.send(connection, Answer(5), [])
    assert read(frontend) == Answer(5)


def test_without_descriptors_nobody_is_let_in_and_everybody_else_is_served(
    executor: Executor,
) -> None:
    first, connection = executor.greeted()
    late = executor.connect(HELLO, request(1))
    with no_descriptors():
        first.send(messages.encode(Cancel(3)))
        assert executor.receive(1) == [(connection, Cancel(3))]
    ((_, message),) = executor.receive(1)
    assert message == request(1)
    assert read(late) == OURS


def test_without_descriptors_for_its_welcome_a_frontend_loses_its_channel(
    executor: Executor,
) -> None:
    first, connection = executor.greeted()
    late = executor.connect(HELLO)
    with no_descriptors(but=1):  # a descriptor for the channel; the status page needs another
        executor.receive(0)
    with pytest.raises(PeerDied):
        late.receive(5.0)
    first.send(messages.encode(Cancel(3)))
    assert executor.receive(1) == [(connection, Cancel(3))]


def test_an_answer_that_cannot_be_kept_for_want_of_a_descriptor_costs_its_channel(
    executor: Executor,
) -> None:
    _, connection = executor.greeted()
    slot = executor.memory.reserve(1000)
    answers = 0
    while not connection.backlog:  # until the frontend, which reads nothing, has no room
        executor.channels.send(connection, Answer(answers), [])
        answers += 1
    with no_descriptors(but=1):
        executor.channels.send(connection, Answer(answers), [slot.segment])
    assert connection.closed
    executor.receive(1)
    executor.memory.reclaim(slot)
