"""Who does what is posted to the HTTP/2 engine's loop: the thread that asks, if nobody else can."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.testing.running_server import WATCHDOG_S, wait_until


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.post(loop.stop)
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()


def asleep(loop: EventLoop) -> None:
    """The loop has seen what was posted, and waits."""
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(WATCHDOG_S)
    done: list[bool] = []

    def here() -> bool:
        mine = threading.get_ident()
        loop.do(lambda: done.append(threading.get_ident() == mine))
        return done[-1:] == [True]

    wait_until(here, "nobody has the turn")


def test_a_thread_does_its_own_while_the_loop_waits(loop: EventLoop) -> None:
    asleep(loop)
    who: SimpleQueue[int] = SimpleQueue()

    def action() -> None:
        who.put(threading.get_ident())
        loop.at_turns_end(lambda: who.put(threading.get_ident()))

    loop.do(action)
    assert {who.get_nowait(), who.get_nowait()} == {threading.get_ident()}


def test_what_is_done_comes_after_what_was_posted(loop: EventLoop) -> None:
    """The order of a call's answers, of which some find the loop in its turn."""
    got: list[int] = []
    for n in range(2000):
        (loop.post if n % 3 else loop.do)(lambda n=n: got.append(n))  # type: ignore[misc]
    wait_until(lambda: len(got) == 2000, "all are done")
    assert got == list(range(2000))


def test_who_has_the_turn_does_what_comes_meanwhile(loop: EventLoop) -> None:
    entered, go, done = threading.Event(), threading.Event(), threading.Event()
    where: list[int] = []

    def busy() -> None:
        entered.set()
        assert go.wait(WATCHDOG_S)

    asleep(loop)
    holder = threading.Thread(target=loop.do, args=(busy,))
    holder.start()
    assert entered.wait(WATCHDOG_S)
    loop.do(lambda: (where.append(threading.get_ident()), done.set()))  # type: ignore[arg-type]
    assert not where
    go.set()
    assert done.wait(WATCHDOG_S)
    holder.join(WATCHDOG_S)
    assert where != [threading.get_ident()]


def test_a_timer_of_another_thread_shortens_the_loops_sleep(loop: EventLoop) -> None:
    asleep(loop)
    passed = threading.Event()
    loop.do(lambda: loop.at(loop.now + 0.05, passed.set))
    assert passed.wait(WATCHDOG_S)


def test_actions_never_overlap(loop: EventLoop) -> None:
    inside: list[int] = []
    most: list[int] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def action() -> None:
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0)  # another thread may go on here
            inside.pop()

        def readable(_: int) -> None:
            ours.recv(1)
            action()

        loop.do(lambda: loop.add(ours.fileno(), readable))

        def worker() -> None:
            for _ in range(300):
                loop.do(action)
                theirs.send(b"x")

        threads = [threading.Thread(target=worker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WATCHDOG_S)
        wait_until(lambda: len(most) == 2400, "all are done")
        removed = threading.Event()
        loop.post(lambda: (loop.remove(ours.fileno()), removed.set()))  # type: ignore[arg-type]
        assert removed.wait(WATCHDOG_S)
    assert set(most) == {1}
