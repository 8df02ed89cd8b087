"""Users of the client socket: one user's descriptors cost other users nothing."""

import contextlib
import os
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import Any

from shmserve.config import Settings
from shmserve.coordinator.programs import client_socket
from shmserve.coordinator.programs.client_socket import ClientSocket
from shmserve.core.caller import Caller
from shmserve.protocol.control import client_messages as wire
from shmserve.transport import deferred_close
from shmserve.transport.trust import peer_credentials
from tests.integration.lane_client import Connection, connected
from tests.running_server import open_fds, wait_until

NOT_SEALED = "the descriptor must be a memfd sealed with F_SEAL_SHRINK and F_SEAL_GROW"


def test_a_user_whose_descriptors_are_stuck_is_alone(tmp_path: Path, monkeypatch) -> None:
    may_close, uids = threading.Event(), iter([1, 2])
    none: Any = None
    path = str(tmp_path / "client.sock")

    def slow_close(fd: int) -> None:
        assert may_close.wait(60)
        os.close(fd)

    monkeypatch.setattr(deferred_close, "_close", slow_close)
    monkeypatch.setattr(deferred_close, "_STUCK_S", 0.0)
    monkeypatch.setattr(peer_credentials, "caller_of", lambda sock: Caller(next(uids)))
    before = open_fds(os.getpid())
    pipe = os.pipe()
    with selectors.DefaultSelector() as selector:
        served = ClientSocket(Settings(client_socket=path), none, none, selector)
        served.serve(True)

        def ask(program: Connection, message: Any, *fds: int) -> Any:
            program.send(message, fds)
            for key, events in selector.select(10):
                if key.data is served:
                    served.accept(key.fileobj)
                else:
                    served.ready(key.data, events)
            served.settle(time.monotonic())
            data = program.sock.recv(1 << 16)
            return wire.decode_from_server(data) if data else None

        def greeted() -> Connection:
            program = Connection(connected(path))
            served.accept(selector.select(10)[0][0].fileobj)  # type: ignore[arg-type]
            assert isinstance(ask(program, wire.ClientHello(wire.VERSION)), wire.ServerHello)
            return program

        registration = wire.RegisterMemfd("a", 0, 1)
        with greeted() as hostile, greeted() as innocent:
            replies = [ask(hostile, registration, *pipe[:1] * 100) for _ in range(3)]
            assert all("exactly one" in reply.text for reply in replies)
            assert ask(hostile, registration, pipe[0]) is None, "the connection has ended"
            assert ask(innocent, registration, pipe[0]).text == NOT_SEALED
        may_close.set()
        served.serve(False)
        for fd in pipe:
            os.close(fd)
    wait_until(lambda: open_fds(os.getpid()) <= before, "later tests count descriptors")


def test_refused_connections_do_not_pile_up(tmp_path: Path, monkeypatch) -> None:
    """As on kernels whose sockets cannot refuse descriptors."""
    may_close = threading.Event()
    none: Any = None
    accepted: list[socket.socket] = []
    path = str(tmp_path / "client.sock")

    def slow_close(fd: int) -> None:
        assert may_close.wait(60)
        os.close(fd)

    def caller_of(sock: socket.socket) -> Caller:
        accepted.append(sock)
        return Caller(1)

    monkeypatch.setattr(deferred_close, "_close", slow_close)
    monkeypatch.setattr(peer_credentials, "caller_of", caller_of)
    monkeypatch.setattr(client_socket, "pass_descriptors", lambda *_: None)
    monkeypatch.setattr(client_socket, "_MAX_PER_USER", 0)
    monkeypatch.setattr(client_socket, "_MAX_OPEN", 6)
    with contextlib.ExitStack() as stack, open(tmp_path / "file", "wb") as file:
        selector = stack.enter_context(selectors.DefaultSelector())
        served = ClientSocket(Settings(client_socket=path), none, none, selector)
        served.serve(True)
        for _ in range(20):
            program = stack.enter_context(Connection(connected(path)))
            program.send(wire.ClientHello(wire.VERSION), [file.fileno()])

        def turn() -> int:
            for key, _ in selector.select(0):
                served.accept(key.fileobj)  # type: ignore[arg-type]
            served.settle(time.monotonic())
            return len(accepted)

        assert [turn() for _ in range(30)][-1] == 6
        may_close.set()
        wait_until(lambda: turn() == 20, "the listener goes on")
        wait_until(lambda: all(sock.fileno() < 0 for sock in accepted), "all are closed")
        served.serve(False)
