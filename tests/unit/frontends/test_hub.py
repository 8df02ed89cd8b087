"""The loop of an HTTP worker, and the greenlets that wait on the loop."""

import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from shmserve import waiting
from shmserve.errors import DeadlineExceeded, PeerDied, Unavailable
from shmserve.frontends.hub import Hub
from shmserve.frontends.side_threads import SideThreads
from shmserve.transport.channel import Channel
from tests.running_server import wait_until

WATCHDOG_S = 30.0


class Loop:
    """Runs functions as greenlets of one hub until all have ended."""

    def __init__(self) -> None:
        self.hub = Hub(2, "some_threads")
        self.open = 0
        self.errors: list[BaseException] = []

    def start(self, run: Callable[..., object], *args: Any) -> None:
        def guarded() -> None:
            try:
                run(*args)
            except BaseException as ex:
                self.errors.append(ex)
            self.open -= 1
            self.hub.leave()

        self.open += 1
        self.hub.spawn(guarded)

    def run(self, *works: Callable[[], object]) -> None:
        """Start these functions, and run until all have ended."""
        for work in works:
            self.start(work)
        give_up = time.monotonic() + WATCHDOG_S
        while self.open:
            self.hub.run(give_up)
            assert time.monotonic() < give_up, "a greenlet waits for ever"
        if self.errors:
            raise self.errors[0]


@pytest.fixture
def loop():
    loop = Loop()
    waiting.install(loop.hub)
    try:
        yield loop
    finally:
        waiting.install(None)
        loop.hub.close()


@pytest.fixture
def ends():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = Channel(one), Channel(other)
    yield channels
    for channel in channels:
        channel.close()


def test_who_waits_gives_way(loop: Loop, ends: tuple[Channel, Channel]) -> None:
    told: list[str] = []

    def ask() -> None:
        told.append("asked")
        told.append(bytes(ends[0].receive(WATCHDOG_S)[0]).decode())
        told.append(bytes(ends[0].receive(WATCHDOG_S)[0]).decode())

    def answer() -> None:
        told.append("sends")
        ends[1].send(b"one")  # both before anybody looks
        ends[1].send(b"two")

    loop.run(ask, answer)
    assert told == ["asked", "sends", "one", "two"]


def test_what_came_when_nobody_waited_is_found_later(loop, ends) -> None:
    def ask() -> None:
        ends[1].send(b"one")
        assert ends[0].receive(WATCHDOG_S)[0] == b"one"
        ends[1].send(b"two")
        waiting.sleep(0.02)  # the loop sees the event meanwhile
        waiting.sleep(0.02)
        assert ends[0].receive(WATCHDOG_S)[0] == b"two"
        ends[1].close()
        waiting.sleep(0.02)
        with pytest.raises(PeerDied):
            ends[0].receive(WATCHDOG_S)

    loop.run(ask)


def test_waits_end_in_the_order_of_their_deadlines(loop, ends) -> None:
    over: list[float] = []
    all_began = time.monotonic()

    def wait(seconds: float) -> None:
        waiting.sleep(all_began + seconds - time.monotonic())
        assert time.monotonic() - all_began >= seconds
        over.append(seconds)

    def receive() -> None:
        for seconds in (0.3, 0.1, 0.2):  # a late timer, an earlier timer, and a timer in between
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                ends[0].receive(seconds)
            assert time.monotonic() - began >= seconds

    for seconds in (0.2, 0.05, 0.1):
        loop.start(wait, seconds)
    loop.run(receive)
    assert over == [0.05, 0.1, 0.2]


def test_a_send_waits_for_room_and_for_no_longer_than_its_limit(loop, ends, monkeypatch) -> None:
    got: list[int] = []

    def send() -> None:
        for _ in range(64):
            ends[0].send(b"x" * 65536)
        monkeypatch.setattr("shmserve.transport.channel._SEND_TIMEOUT_S", 0.3)
        with pytest.raises(PeerDied):
            fill()

    def fill() -> None:
        while True:
            ends[0].send(b"x" * 65536)

    def take() -> None:
        while len(got) < 64:
            got.append(len(ends[1].receive(WATCHDOG_S)[0]))

    loop.run(send, take)
    assert len(got) == 64


def test_an_event_ends_a_wait_for_a_channel(loop: Loop, ends: tuple[Channel, Channel]) -> None:
    def wait() -> None:
        event, ready = loop.hub.event(), loop.hub.watch(ends[0].fileno())
        assert not event.wait(0.02, ready)
        ends[1].send(b"x")
        event.wait(WATCHDOG_S, ready)
        assert ends[0].receive_within() is not None
        threading.Timer(0.02, event.set).start()
        event.wait(WATCHDOG_S, ready)
        assert event.is_set()
        event.wait(WATCHDOG_S, ready)
        # The next waiter for the channel is not affected
        late = loop.hub.event()
        late.wait(0.01, ready)
        late.set()
        assert not ready.wait(time.monotonic() + 0.02)

    loop.run(wait)


def test_work_beside_lets_others_go_on_and_has_its_result_and_its_error(loop: Loop) -> None:
    gate = threading.Event()
    told: list[object] = []

    def heavy() -> None:
        told.append(waiting.beside(gate.wait, WATCHDOG_S))
        with pytest.raises(ZeroDivisionError):
            waiting.beside(lambda: 1 // 0)
        assert waiting.beside(threading.get_ident) != threading.get_ident()

    def light() -> None:
        told.append("light")
        gate.set()

    loop.run(heavy, light)
    assert told == ["light", True]


def test_an_error_beside_is_freed_without_the_collector(loop: Loop) -> None:
    """A failed call's frames may hold a large message."""
    gone: list[weakref.ref[Any]] = []

    def heavy() -> None:
        def fails(message: threading.Event) -> None:
            raise ZeroDivisionError

        message = threading.Event()
        gone.append(weakref.ref(message))
        with contextlib.suppress(ZeroDivisionError):
            waiting.beside(fails, message)

    gc.disable()
    try:
        loop.run(heavy)
        # the thread beside drops the call a moment later
        wait_until(lambda: gone[0]() is None, "the error keeps what the call held")
    finally:
        gc.enable()


def test_a_lock_that_is_held_beside_keeps_no_greenlet_from_it(loop: Loop) -> None:
    """Like the lock of a growing arena: all waiters are beside, regardless of the lock's
    holder."""
    lock, count = threading.Lock(), [0]

    def grow() -> None:
        with lock:
            seen = count[0]
            time.sleep(0.01)
            count[0] = seen + 1

    for _ in range(10):
        loop.start(waiting.beside, grow)
    loop.run()
    assert count == [10]


def test_events_are_set_by_any_thread_and_tasks_are_joined(loop: Loop) -> None:
    def wait() -> None:
        event = waiting.event()
        assert not event.wait(0.01)
        threading.Timer(0.02, event.set).start()
        assert event.wait(WATCHDOG_S)
        assert event.wait(0)
        done: list[int] = []
        tasks = [waiting.start(lambda: done.append(waiting.sleep(0.01) or 1), "") for _ in "ab"]
        for task in tasks:
            task.join()
        assert done == [1, 1]

    loop.run(wait)


def test_a_descriptor_that_was_closed_and_is_another_now(loop: Loop) -> None:
    def use() -> None:
        for _ in range(20):
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel, peer = Channel(one), Channel(other)
            assert channel.receive_within(0.001) is None
            peer.send(b"x")
            assert channel.receive(WATCHDOG_S)[0] == b"x"
            peer.send(b"left there")
            channel.close()
            peer.close()

    loop.run(use, use)


def test_what_is_told_of_a_closed_descriptor_ends_no_wait_for_its_successor(loop: Loop) -> None:
    """Both channels were ready; the first greenlet closes the other channel and waits for a new
    channel with the closed descriptor's number."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    (first, other), (old, its_peer), (new, silent) = pairs
    channels, peers = [Channel(first), Channel(old)], [Channel(other), Channel(its_peer)]

    def use() -> None:
        for channel, peer in zip(channels, peers, strict=True):
            peer.send(b"so that the loop watches it")
            channel.receive(WATCHDOG_S)
        # a turn without both channels, otherwise the later channel is reported first
        waiting.sleep(0.01)
        for peer in peers:
            peer.send(b"in one turn")
        channels[0].receive(WATCHDOG_S)
        number = channels[1].fileno()
        channels[1].close()
        os.dup2(new.fileno(), number, inheritable=False)
        channels[1] = Channel(socket.socket(fileno=number))
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            channels[1].receive(0.1)
        assert time.monotonic() - began >= 0.1

    loop.run(use)
    for each in (*channels, *peers, new, silent):
        each.close()  # type: ignore[attr-defined]


def test_who_is_called_for_a_descriptor_that_another_waited_for_before(loop: Loop) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, got = Channel(one), []
    loop.start(channel.receive, WATCHDOG_S)
    other.send(b"x")
    loop.run()
    fd = channel.fileno()
    channel.close()
    left, right = socket.socketpair()
    if left.fileno() != fd:  # garbage collection has just closed a lower descriptor
        os.dup2(left.fileno(), fd)
        left.close()
        left = socket.socket(fileno=fd)
    loop.hub.handle(fd, lambda _: (got.append(left.recv(9)), loop.hub.leave()))  # type: ignore[arg-type]
    for text in (b"first", b"second"):
        right.send(text)
        loop.hub.run(time.monotonic() + WATCHDOG_S)
        assert got.pop() == text
    # as if by mistake: the owner can still close the descriptor
    loop.hub._descriptors.epoll.unregister(fd)
    loop.hub.unhandle(fd)
    for sock in (other, left, right):
        sock.close()


def test_threads_beside_are_no_more_than_allowed() -> None:
    threads, running, most = SideThreads(3, "some_threads"), [0], [0]
    lock, over = threading.Lock(), threading.Semaphore(0)
    meeting = threading.Barrier(3)

    def item() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meeting.wait(WATCHDOG_S)
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        over.release()

    for _ in range(21):
        threads.submit(item)
    for _ in range(21):
        assert over.acquire(timeout=WATCHDOG_S)
    assert most[0] == 3


def test_what_waits_for_a_thread_has_a_bound() -> None:
    threads, gate = SideThreads(1, "some_threads"), threading.Event()
    over = threading.Semaphore(0)

    def item() -> None:
        gate.wait(WATCHDOG_S)
        over.release()

    taken: list[int] = []

    def fill() -> None:
        while True:
            threads.submit(item)
            taken.append(1)

    with pytest.raises(Unavailable, match="some_threads"):
        fill()
    gate.set()
    for _ in taken:
        assert over.acquire(timeout=WATCHDOG_S)
    while True:  # room returns as soon as the last item has been put away
        try:
            threads.submit(item)
            break
        except Unavailable:
            time.sleep(0.01)
    assert over.acquire(timeout=WATCHDOG_S)


def test_an_error_ends_its_greenlet_alone(loop: Loop, caplog) -> None:
    loop.hub.spawn(lambda: 1 // 0)
    loop.start(waiting.sleep, 0.01)
    loop.run()
    assert "ZeroDivisionError" in caplog.text


def test_timers_of_what_is_over_are_dropped(loop: Loop) -> None:
    """Each connection leaves a timer that would be due only after a minute."""
    over: list[int] = []

    def use() -> None:
        for _ in range(5000):
            event = waiting.event()
            loop.hub.soon(event.set)
            assert event.wait(1000.0)
        over.append(1)

    loop.start(waiting.sleep, 0.3)
    loop.run(use)
    assert over
    assert len(loop.hub._timers.heap) < 2500


def test_who_still_waits_ends_with_the_hub_in_its_thread() -> None:
    """A greenlet freed later by another thread could crash the process."""
    ended: list[int] = []

    def stubborn() -> None:
        try:
            hub.sleep(3600)
        finally:
            hub.sleep(3600)

    def polite() -> None:
        try:
            hub.sleep(3600)
        finally:
            ended.append(threading.get_ident())

    hub = Hub(1, "some_threads")
    hub.spawn(stubborn)
    hub.spawn(polite)
    hub.soon(hub.leave)
    hub.run(time.monotonic() + WATCHDOG_S)
    assert len(hub._living) == 2
    hub.close()
    assert ended == [threading.get_ident()]
    assert not hub._living


def test_one_greenlet_runs_what_comes_one_after_the_other(loop: Loop) -> None:
    """A reused greenlet keeps its stack, and a new stack would cost more."""
    seen: list[object] = []

    def note() -> None:
        seen.append(getcurrent())
        loop.hub.sleep(0)

    def fail() -> None:
        note()
        raise ValueError("a defect")

    for count, run in enumerate((note, fail, note), start=1):
        loop.hub.spawn(run)
        while len(seen) < count or loop.hub.is_busy:
            loop.hub.run(time.monotonic() + 0.02)
    assert len(seen) == 3
    assert len(set(map(id, seen))) == 1
    assert not loop.hub.is_busy


def test_what_a_greenlet_has_run_is_not_kept(loop: Loop) -> None:
    class Work:
        def run(self) -> None:
            loop.hub.sleep(0)

    work = Work()
    known = weakref.ref(work)
    loop.start(work.run)
    del work
    loop.run()
    loop.start(loop.hub.sleep, 0.01)
    loop.run()
    assert known() is None


def test_a_closed_hub_knows_nothing_of_its_thread() -> None:
    """Otherwise the greenlet library may free objects of the hub when the hub is collected as
    garbage while a thread ends."""
    hub = Hub(1, "some_threads")
    mains: list[weakref.ref[greenlet]] = []
    freed: list[object] = []

    def run() -> None:
        hub.run(0.0)
        mains.append(weakref.ref(getcurrent(), freed.append))
        hub.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # The library frees the greenlet when this thread next waits. A reference from this thread's
    # stack, as of a look at the weak reference, could crash the process then.
    wait_until(lambda: freed, "the thread's greenlet is freed")


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        hub = Hub(1, "some_threads")
        hub.spawn(hub.sleep, 1000.0)
        hub.run(0.0)
        hub.close()
        del hub
        gc.collect()  # the hub and its waiters refer to each other
    assert len(os.listdir("/proc/self/fd")) <= before
