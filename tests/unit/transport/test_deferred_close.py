"""Descriptors of strangers, closed by a separate thread."""

import os
import socket
import threading
from types import SimpleNamespace

from shmserve.transport import deferred_close
from shmserve.transport.deferred_close import DeferredClose
from tests.running_server import wait_until
from tests.stray_descriptors import lingering, pass_on


def test_closes() -> None:
    it = DeferredClose()
    read, write = os.pipe()
    it.close([write, 1 << 20])
    assert os.read(read, 1) == b"", "EOF: the other end is closed"
    it.close([read])
    assert not it.stuck


def test_one_that_waits_for_ever_stops_the_intake(monkeypatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(deferred_close, "os", SimpleNamespace(close=lambda fd: may_end.wait(60)))
    it = DeferredClose()
    it.close(range(1000, 1100))
    assert not it.stuck, "a burst, before the thread had its turn, is none"
    it.close(range(1100, 1300))
    wait_until(lambda: it.stuck, "it is stuck")
    may_end.set()
    wait_until(lambda: not it.stuck, "it goes on")


def test_descriptors_that_came_before_the_threads_turn_are_not_stuck(monkeypatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(deferred_close, "_STUCK_S", 60)
    it = DeferredClose()
    it.close(range(1000, 1300))
    assert it.busy
    assert not it.stuck


def test_a_thread_that_cannot_start_is_started_later(monkeypatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    it = DeferredClose()
    ends = [os.pipe(), os.pipe()]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        it.close([ends[0][1]])
    it.close([ends[1][1]])
    for read, _ in ends:
        assert os.read(read, 1) == b""
        os.close(read)


def test_a_socket_that_would_linger_delays_nothing() -> None:
    it = DeferredClose()
    read, write = os.pipe()
    with lingering(1) as (sock,):
        it.close([sock.detach(), write])
        assert os.read(read, 1) == b""
        it.close([read])


def test_the_descriptors_of_unread_messages_delay_nothing() -> None:
    it = DeferredClose()
    read, write = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with lingering(3) as strays, theirs:
        pass_on(theirs, b"", strays[:2])
        theirs.send(b"")
        pass_on(theirs, b"unread", strays[2:])
        it.close_socket(ours)
        assert theirs.recv(1) == b"", "the connection ends at once"
        it.close([write])
        assert os.read(read, 1) == b""
        it.close([read])
        wait_until(lambda: ours.fileno() < 0, "the socket stays open")


def test_a_thread_ends_when_it_has_nothing_to_do(monkeypatch) -> None:
    monkeypatch.setattr(deferred_close, "_IDLE_S", 0.01)
    it = DeferredClose()
    for _ in range(3):
        read, write = os.pipe()
        it.close([write])
        assert os.read(read, 1) == b""
        os.close(read)
        wait_until(lambda: "closer" not in {t.name for t in threading.enumerate()}, "it goes on")
