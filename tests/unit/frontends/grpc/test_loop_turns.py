"""The thread of the HTTP/2 engine: posted functions, waiting calls, and time."""

import threading
from time import monotonic

import pytest

from shmserve import waiting
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from tests.running_server import WATCHDOG_S, wait_until


@pytest.fixture
def loop():
    loop = EventLoop(2)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.post(loop.stop)
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()


def test_what_is_posted_is_done_in_order_by_the_loop(loop: EventLoop) -> None:
    got: list[tuple[int, int]] = []
    for n in range(2000):
        loop.post(lambda n=n: got.append((n, threading.get_ident())))  # type: ignore[misc]
    wait_until(lambda: len(got) == 2000, "all are done")
    assert [n for n, _ in got] == list(range(2000))
    assert len({thread for _, thread in got}) == 1
    assert got[0][1] != threading.get_ident()


def test_others_go_on_while_one_waits(loop: EventLoop) -> None:
    over, gate = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.beside(gate.wait, WATCHDOG_S)
        over.set()

    loop.post(lambda: loop.enter(wait))
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(WATCHDOG_S)
    assert not over.is_set()
    gate.set()
    assert over.wait(WATCHDOG_S)


def test_an_error_ends_neither_the_loop_nor_what_comes_after(loop: EventLoop, caplog) -> None:
    over = threading.Event()
    loop.post(lambda: 1 // 0)
    loop.post(lambda: loop.enter(lambda: 1 // 0))
    loop.post(over.set)
    assert over.wait(WATCHDOG_S)
    assert len(caplog.records) == 2


def test_what_is_to_be_done_earlier_shortens_the_loops_sleep(loop: EventLoop) -> None:
    passed, expired = threading.Event(), threading.Event()

    class Call:
        def is_active(self) -> bool:
            return True

        def expire(self) -> None:
            expired.set()

    threading.Event().wait(0.02)  # the loop sleeps
    loop.post(lambda: loop.at(monotonic() + 0.05, passed.set))
    assert passed.wait(WATCHDOG_S)
    loop.post(lambda: loop.deadline(monotonic() + 1000, Call()))
    loop.post(lambda: loop.deadline(monotonic() + 0.05, Call()))
    assert expired.wait(WATCHDOG_S)


def test_the_end_waits_for_what_still_waits() -> None:
    loop, over = EventLoop(2), threading.Event()

    def wait() -> None:
        waiting.sleep(0.1)
        over.set()

    loop.post(lambda: loop.enter(wait))
    loop.post(loop.stop)
    loop.run()
    assert over.is_set()
