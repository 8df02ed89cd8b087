"""A connection's beginning and end: what goes wrong with one costs the others nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.executor.process.__main__ import Executor
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.http.server import worker as http_worker
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.worker import ConnectionWorker
from shmserve.frontends.hub import Hub
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen
from tests.grpc_client import Rig

WATCHDOG_S = 60.0


class Worker(SimpleNamespace):
    """As much of an HTTP worker as its acceptor sees; the first connection is one too many."""

    def __init__(self) -> None:
        super().__init__(
            alive=True,
            accepts=0,
            pauses=0,
            told=0,
            vacated=0.0,
            ended_since_accept=False,
        )
        self.cfg = SimpleNamespace(workers=1)
        self.connections: dict[Any, Any] = {}
        self.hub = SimpleNamespace(pause=lambda: None, sleep=self.sleep)
        self.log = SimpleNamespace(exception=self.tell)

    def sleep(self, _: float) -> None:
        self.pauses += 1

    def tell(self, _: str) -> None:
        self.told += 1

    def _accept_some(self, *_: object) -> None:
        self.accepts += 1
        if self.accepts == 1:
            raise RuntimeError("of one connection")
        self.alive = False


def test_an_http_worker_goes_on_accepting_a_little_later() -> None:
    worker: Any = Worker()
    with socket.socket() as listener:
        ConnectionWorker._accept_all(worker, listener, SimpleNamespace(wait=lambda _: True))  # type: ignore[arg-type]
    assert (worker.accepts, worker.pauses, worker.told) == (2, 1, 1)


class Client:
    """In the place of an `HttpConnection`: a client that closes without having asked."""

    watch = ("head", inf)

    def __init__(self, _service: object, sock: Any, *_: object) -> None:
        self.sock = sock

    def serve(self) -> None:
        assert not self.sock.recv(1)


class AcceptingWorker(ConnectionWorker):
    """One of two workers, without gunicorn: it accepts what its listener has, and counts sleeps."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.cfg, self.log, self.alive = SimpleNamespace(workers=2), logging.getLogger(), True
        self.settings, self.service = SimpleNamespace(max_connections=4096), None  # type: ignore[assignment]
        self.connections = set()
        self.vacated, self.ended_since_accept, self.sleeps = 0.0, False, 0
        self.hub = Hub(1, "")
        stack.callback(self.hub.close)
        self.hub.sleep, self._sleep = self._count, self.hub.sleep  # type: ignore[method-assign]
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        self.listener.setblocking(False)
        ready = self.hub.watch(self.listener.fileno())
        self.hub.spawn(self._accept_all, self.listener, ready)

    def _count(self, seconds: float) -> None:
        self.sleeps += 1
        self._sleep(seconds)

    def turn_until(self, condition: Callable[[], bool]) -> int:
        """Run the loop until then, and return how often the acceptor has slept."""
        before, give_up = self.sleeps, monotonic() + WATCHDOG_S
        while not condition():
            assert monotonic() < give_up
            self.hub.run(monotonic() + 0.01)
        return self.sleeps - before

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), WATCHDOG_S)


def test_the_pause_before_accepting_is_for_connections_that_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_worker, "HttpConnection", Client)
    with contextlib.ExitStack() as stack:
        worker = AcceptingWorker(stack)
        lasting = [stack.enter_context(worker.connect()) for _ in range(200)]
        paced = worker.turn_until(lambda: len(worker.connections) == len(lasting))
        # 1 at first, 2 beyond 64, 3 beyond 128: the rest was left to the other worker
        assert paced >= 63 + 64 // 2 + 72 // 3

        gone = [worker.connect() for _ in range(300)]
        for client in gone:
            client.close()
        last = stack.enter_context(worker.connect())
        name = last.getsockname()
        slept = worker.turn_until(
            lambda: (
                name in (c.sock.getpeername() for c in worker.connections)
                and len(worker.connections) == len(lasting) + 1
            )
        )
        before = worker.sleeps
        assert slept < 30, "those that have gone made room for the next: nobody waits for it"

        for _ in range(10):
            here = worker.connect()
            assert worker.turn_until(lambda: len(worker.connections) == len(lasting) + 2) <= 1
            here.close()
            worker.turn_until(lambda: len(worker.connections) == len(lasting) + 1)
        assert worker.sleeps <= before + 1, "a connection that has ended made room for the next"

        total = len(lasting) + 2
        stack.enter_context(worker.connect())
        worker.turn_until(lambda: len(worker.connections) == total)
        stack.enter_context(worker.connect())
        assert worker.turn_until(lambda: len(worker.connections) == total + 1) == 1, (
            "an idle worker goes first, whatever room there is"
        )


def test_a_grpc_connection_that_cannot_be_set_up_is_closed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = Http2Engine._connected

    def first_fails(engine: Http2Engine, *arguments: Any) -> None:
        monkeypatch.setattr(Http2Engine, "_connected", connected)
        raise RuntimeError("of one connection")

    with Rig() as rig:
        monkeypatch.setattr(Http2Engine, "_connected", first_fails)
        host, _, port = rig.target.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as sock:
            assert sock.recv(1) == b"", "it has been closed"
        assert rig.client.infer().outputs


@pytest.mark.parametrize("lanes", [None, object()])
def test_a_lane_that_comes_without_its_descriptor_is_none(lanes: object) -> None:
    sent: list[LanesOpen] = []
    executor: Any = SimpleNamespace(channels=lanes, link=SimpleNamespace(send=sent.append))
    Executor._on_lane(executor, LaneOffered(7, 1, 1), [])
    assert sent == [LanesOpen((7,), ended=True)], "the coordinator has counted it"


@pytest.mark.parametrize("lingers", [True, False])
def test_who_is_refused_while_it_still_sends_reads_why(lingers: bool) -> None:
    """Without lingering what it sends meets a closed socket: the connection is reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), 30)
        accepted, _ = listener.accept()

    def refuse() -> None:
        accepted.sendall(b"why")
        if lingers:
            HttpConnection._linger(SimpleNamespace(sock=accepted))  # type: ignore[arg-type]
        accepted.close()

    client.sendall(bytes(64 << 10))
    worker = threading.Thread(target=refuse)
    worker.start()
    if not lingers:
        worker.join()
    with client, pytest.raises(ConnectionError) if not lingers else contextlib.nullcontext():
        client.sendall(bytes(8 << 10))
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read() == b"why"
    worker.join()
