"""A link against a coordinator played by the test, over a real socket."""

import os
import threading
import time

import pytest

from shmserve.errors import ProtocolViolation
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import (
    Adopt,
    AskStats,
    GiveBack,
    Grant,
    Granted,
    Hello,
    Loaded,
    LoadFailed,
    Stats,
    Stop,
    Trim,
    Welcome,
)
from shmserve.protocol.control.region_messages import StoredRegions
from shmserve.supervisor.fd_store import FdStore
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.channel import Channel, close_all, listen
from shmserve.transport.link import Link, LinkHandlers, _retry_s
from tests.log_lines import log_lines
from tests.running_server import open_fds, wait_until

SPEC = ModelSpec("m", "1", "", "python", 0, (), ())


class Coordinator:
    """Accepts one link at a time and acts as the test demands."""

    def __init__(self, run_dir: str) -> None:
        self.path = os.path.join(run_dir, "coordinator.sock")
        self.come()
        self.channel: Channel | None = None

    def come(self) -> None:
        self.listener = listen(self.path)
        self.listener.settimeout(30)

    def go_away(self) -> None:
        """Disappear as if killed; no process can connect until another coordinator exists."""
        self.listener.close()
        self.channel.close()

    def accept(self, version: int = messages.VERSION) -> Hello:
        sock, _ = self.listener.accept()
        if self.channel is not None:
            self.channel.close()
        self.channel = Channel(sock)
        hello = self.receive()
        assert isinstance(hello, Hello)
        self.send(Welcome(version, "e1"))
        return hello

    def send(self, message) -> None:
        self.channel.send(messages.encode(message))

    def receive(self):
        data, _ = self.channel.receive(30.0)
        return messages.decode_to_coordinator(data)

    def close(self) -> None:
        self.listener.close()
        if self.channel is not None:
            self.channel.close()


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path)


@pytest.fixture
def coordinator(run_dir):
    coordinator = Coordinator(run_dir)
    yield coordinator
    coordinator.close()


def handlers(**more) -> LinkHandlers:
    """Callbacks of a link, of which those that are not given do nothing."""
    idle = {"on_trim": lambda _: None, "on_stats": lambda _: {}, "held_bytes": lambda: 0}
    return LinkHandlers(**{**idle, **more})


class Process:
    """The callbacks of a link, and a record of their arguments."""

    def __init__(self, run_dir: str, **options) -> None:
        self.told: list = []
        self.held = 7
        self.link = Link(
            run_dir,
            "executor",
            "executor-1-aa",
            LinkHandlers(
                on_trim=lambda nbytes: self.told.append(("trim", nbytes)),
                on_stats=lambda what: {"asked": what},
                on_stop=lambda reason: self.told.append(("stop", reason)),
                on_message=lambda message: self.told.append(message),
                held_bytes=lambda: self.held,
                **options,
            ),
            "m/1/0",
            first_bytes=3,
        )
        self.link.start()


@pytest.fixture
def process(run_dir):
    process = Process(run_dir)
    yield process
    process.link.close()


def test_it_says_hello_and_passes_on_what_it_is_told(coordinator, process):
    hello = coordinator.accept()
    assert hello == Hello(
        messages.VERSION, "executor", "executor-1-aa", os.getpid(), 7, None, "m/1/0", first_bytes=3
    )
    wait_until(lambda: process.link.connected, "the link")
    assert process.link.epoch == "e1"
    coordinator.send(Trim(5))
    coordinator.send(Stop("drain"))
    coordinator.send(Adopt((("m/1/0", 3, "executor-2-bb"),)))
    coordinator.send(AskStats(4, "slots"))
    assert coordinator.receive() == Stats(4, {"asked": "slots"})
    assert process.told == [
        Welcome(messages.VERSION, "e1"),
        ("trim", 5),
        ("stop", "drain"),
        Adopt((("m/1/0", 3, "executor-2-bb"),)),
    ]


def in_thread(act):
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    thread.start()
    return thread, answers


@pytest.mark.parametrize("answer", [True, False])
def test_a_grant_waits_for_its_answer(coordinator, process, answer):
    coordinator.accept()
    thread, answers = in_thread(lambda: process.link.grant(64, 30.0))
    grant = coordinator.receive()
    assert grant == Grant(grant.ticket, 64)
    coordinator.send(Granted(grant.ticket + 1, True))  # another process's ticket
    coordinator.send(Granted(grant.ticket, answer, "why"))
    thread.join(30)
    assert answers == [answer]


def test_a_grant_that_comes_too_late_is_given_back(coordinator, process):
    coordinator.accept()
    wait_until(lambda: process.link.connected, "the link")
    assert process.link.grant(64, 0.05) is False
    grant = coordinator.receive()
    coordinator.send(Granted(grant.ticket, True))
    assert coordinator.receive() == GiveBack(64)


def test_without_a_coordinator_a_grant_is_refused_in_time(run_dir, process):
    started = time.monotonic()
    assert process.link.grant(64, 0.1) is False
    assert time.monotonic() - started >= 0.1
    process.link.give_back(64)  # neither blocks nor fails


def test_a_coordinator_is_looked_for_at_a_part_of_the_time_that_it_is_away():
    assert [_retry_s(alone_s) for alone_s in (0.0, 0.8, 3600.0)] == [0.02, 0.05, 0.5]


def test_it_reconnects_and_asks_again(coordinator, process):
    coordinator.accept()
    thread, answers = in_thread(lambda: process.link.grant(64, 30.0))
    assert isinstance(coordinator.receive(), Grant)
    coordinator.go_away()  # before it answered
    wait_until(lambda: not process.link.connected, "the end")
    process.link.give_back(3)  # the next hello tells
    process.held = 4
    coordinator.come()
    hello = coordinator.accept()
    assert hello.held_bytes == 4
    grant = coordinator.receive()
    assert grant == Grant(grant.ticket, 64)
    coordinator.send(Granted(grant.ticket, True))
    thread.join(30)
    assert answers == [True]


def test_what_was_loaded_is_told_again_in_the_hello(run_dir, coordinator):
    loaded = Loaded("m/1/0", SPEC, "executor-1-aa.sock")
    process = Process(run_dir, loaded=lambda: loaded)
    assert coordinator.accept().loaded == loaded
    coordinator.channel.close()
    assert coordinator.accept().loaded == loaded
    process.link.close()


def test_a_failed_load_reaches_the_coordinator_even_if_it_comes_later(run_dir):
    process = Process(run_dir)
    process.link.send(LoadFailed("m/1/0", "no"))
    coordinator = Coordinator(run_dir)
    coordinator.accept()
    assert coordinator.receive() == LoadFailed("m/1/0", "no")
    process.link.close()
    coordinator.close()


def test_closing_sends_what_is_left(coordinator, process):
    coordinator.accept()
    wait_until(lambda: process.link.connected, "the link")
    process.link.send(LoadFailed("m/1/0", "no"))
    process.link.close()
    assert coordinator.receive() == LoadFailed("m/1/0", "no")


def test_closing_before_there_was_a_connection_still_sends_what_is_left(run_dir, monkeypatch):
    monkeypatch.setattr("shmserve.transport.link._CLOSE_S", 30.0)
    process = Process(run_dir)
    process.link.send(LoadFailed("m/1/0", "too soon"))
    closing = threading.Thread(target=process.link.close)
    closing.start()
    time.sleep(0.05)
    coordinator = Coordinator(run_dir)
    coordinator.accept()
    assert coordinator.receive() == LoadFailed("m/1/0", "too soon")
    closing.join(30)
    assert not closing.is_alive()
    coordinator.close()


def test_another_version_is_refused_and_tried_again(coordinator, process, caplog):
    coordinator.accept(messages.VERSION + 1)
    coordinator.accept()
    wait_until(lambda: process.link.connected, "the link")
    assert "speaks another version" in log_lines(caplog)[0]


def test_a_callback_that_fails_does_not_cost_the_link(run_dir, coordinator, caplog):
    def fail(nbytes):
        raise ZeroDivisionError

    link = Link(run_dir, "http", "http-1-aa", handlers(on_trim=fail))
    link.start()
    coordinator.accept()
    coordinator.send(Trim(1))
    coordinator.send(AskStats(1, "busy"))
    assert coordinator.receive() == Stats(1, {})
    assert "ZeroDivisionError" in caplog.text
    link.close()


def test_a_message_that_cannot_be_sent_is_refused_at_once(process):
    with pytest.raises(ProtocolViolation, match="too long"):
        process.link.send(LoadFailed("m/1/0", "x" * 300_000))


def test_a_store_of_many_descriptors_is_handed_over_without_copies_of_all(
    run_dir: str, coordinator: Coordinator
) -> None:
    """The supervisor's limit of descriptors may be little above the number of regions."""
    counts: list[int] = []

    def stored(numbers: tuple[int, ...], more: bool) -> StoredRegions:
        counts.append(open_fds(os.getpid()))
        return StoredRegions(numbers, more)

    store = FdStore[int](stored)
    store.keep(range(400), [os.memfd_create("test") for _ in range(400)])
    links: list[Link] = []
    callbacks = handlers(on_message=lambda _: store.hand_over(links[0]))
    links.append(Link(run_dir, "supervisor", "supervisor-1-aa", callbacks))
    links[0].start()
    coordinator.accept()
    wait_until(lambda: len(counts) == 8, "not all is handed over")
    assert len(set(counts)) == 1
    numbers: list[int] = []
    more = True
    while more:
        data, fds = coordinator.channel.receive(30.0)
        message = messages.decode_to_coordinator(data)
        numbers += message.numbers
        more = message.more
        close_all(fds)
    assert numbers == [*range(400)]
    links[0].close()
    store.drop(range(400))
