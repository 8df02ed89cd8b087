"""Accepting and closing connections: a failure on one connection costs the others nothing."""

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
from shmserve.frontends.connections import acceptor
from shmserve.frontends.connections.acceptor import Acceptor
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.connections.refusals import Refusals
from shmserve.frontends.grpc.http2_engine.server_connection import ServerConnection
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.loop_socket import GreenletSocket
from shmserve.frontends.hub import Hub
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen
from tests.grpc_client import Rig

WATCHDOG_S = 60.0


class Client:
    """Stand-in for a protocol's connection: a client that closes without having asked."""

    idle_since = inf

    def __init__(self, sock: Any) -> None:
        self.sock = sock

    def give_way(self) -> None:
        raise AssertionError("it is in use")


class Accepting:
    """A process that accepts its listener's connections, and counts how often it pauses.

    Attributes:
        begin: called with each accepted socket.
    """

    def __init__(self, stack: contextlib.ExitStack, spread: bool = True) -> None:
        self.hub = Hub(1, "")
        stack.callback(self.hub.close)
        self.pauses: list[float] = []
        self._sleep = self.hub.sleep
        self.hub.sleep = self._count  # type: ignore[method-assign]
        self.begin: Callable[[socket.socket], None] = lambda _: None
        self.connections: OpenConnections[Client] = OpenConnections(4096)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listener.getsockname()
        refusals = Refusals(self.hub, "connections", b"")
        log = logging.getLogger("shmserve")
        self.acceptor = Acceptor(
            self.hub, self.connections, lambda _: 0, refusals, log, spread=spread
        )
        self.acceptor.listen(listener, self._connect)
        stack.callback(self.acceptor.stop)

    def _connect(self, sock: socket.socket, _: object) -> Client:
        self.begin(sock)
        waits: Any = SimpleNamespace(watch=("head", inf))
        connection = Client(GreenletSocket(self.hub, sock, waits))
        self.hub.spawn(self._serve, connection)
        return connection

    def _serve(self, connection: Client) -> None:
        try:
            assert not connection.sock.recv(1)
        finally:
            self.connections.discard(connection)
            connection.sock.close()

    def _count(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._sleep(seconds)

    def turn_until(self, condition: Callable[[], bool]) -> int:
        """Run the loop until then, and return how often the acceptor has paused."""
        before, give_up = len(self.pauses), monotonic() + WATCHDOG_S
        while not condition():
            assert monotonic() < give_up
            self.hub.run(monotonic() + 0.01)
        return len(self.pauses) - before

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, WATCHDOG_S)


def test_after_an_error_a_process_goes_on_accepting_a_little_later(caplog) -> None:
    failures = [RuntimeError("of one connection")]

    def fail_once(_: socket.socket) -> None:
        if failures:
            raise failures.pop()

    with contextlib.ExitStack() as stack:
        process = Accepting(stack, spread=False)
        process.begin = fail_once
        with process.connect() as first:
            process.turn_until(lambda: bool(process.pauses))
            assert first.recv(1) == b"", "it has been closed"
        with process.connect():
            process.turn_until(lambda: len(process.connections) == 1)
        assert process.pauses == [pytest.approx(0.1)]
    assert caplog.text.count("of one connection") == 1


def test_the_pause_before_accepting_is_for_connections_that_last(monkeypatch) -> None:
    monkeypatch.setattr(acceptor, "_VACANT_S", WATCHDOG_S)
    with contextlib.ExitStack() as stack:
        process = Accepting(stack)
        lasting = [stack.enter_context(process.connect()) for _ in range(200)]
        paced = process.turn_until(lambda: len(process.connections) == len(lasting))
        # 1 at first, 2 beyond 64, 3 beyond 128: the rest was left to the other process
        assert paced >= 63 + 64 // 2 + 72 // 3

        gone = [process.connect() for _ in range(300)]
        for client in gone:
            client.close()
        last = stack.enter_context(process.connect())
        name = last.getsockname()
        slept = process.turn_until(
            lambda: (
                name in (c.sock.getpeername() for c in process.connections)
                and len(process.connections) == len(lasting) + 1
            )
        )
        before = len(process.pauses)
        assert slept < 30, "those that have gone made room for the next: nobody waits for it"

        for _ in range(10):
            here = process.connect()
            assert process.turn_until(lambda: len(process.connections) == len(lasting) + 2) <= 1
            here.close()
            process.turn_until(lambda: len(process.connections) == len(lasting) + 1)
        assert len(process.pauses) <= before + 1, "what has ended made room for the next"

        total = len(lasting) + 1
        gone = [process.connect() for _ in range(10)]
        process.turn_until(lambda: len(process.connections) == total + len(gone))
        for client in gone:
            client.close()
        process.turn_until(lambda: len(process.connections) == total)
        for _ in range(3):
            stack.enter_context(process.connect())
        assert process.turn_until(lambda: len(process.connections) == total + 3) == 0, (
            "there is room for each of a few"
        )
        stack.enter_context(process.connect())
        assert process.turn_until(lambda: len(process.connections) == total + 4) == 1, (
            "an idle process goes first, whatever room there is"
        )


def test_a_grpc_connection_that_cannot_be_set_up_is_closed_alone(monkeypatch) -> None:
    begin = ServerConnection.__init__

    def first_fails(connection: ServerConnection, *arguments: Any) -> None:
        monkeypatch.setattr(ServerConnection, "__init__", begin)
        raise RuntimeError("of one connection")

    with Rig() as rig:
        monkeypatch.setattr(ServerConnection, "__init__", first_fails)
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
    """Without lingering, the client's bytes meet a closed socket, which resets the connection."""
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
