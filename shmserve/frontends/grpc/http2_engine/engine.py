"""The engine: its ports, its loop's thread, and how it ends."""

from __future__ import annotations

import errno
import logging
import random
import socket
import threading
from functools import partial
from time import monotonic

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.frontends.grpc.callers import relayed
from shmserve.frontends.grpc.handlers import RpcServices
from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop, guarded
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.open_connections import OpenConnection
from shmserve.frontends.grpc.http2_engine.server_connection import ServerConnection
from shmserve.frontends.grpc.http2_engine.serving import serving_of
from shmserve.frontends.grpc.http2_engine.transports import (
    ConnectionTransport,
    PlainTransport,
    TlsTransport,
)
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.observe import flight_recorder
from shmserve.transport.listen_addresses import parse
from shmserve.transport.trust.peer_credentials import REMOTE
from shmserve.transport.trust.tls import Certificates

_log = logging.getLogger("shmserve.grpc")

_BACKLOG = 1024
_ACCEPTS = 64  # in a turn
_PAUSE_S = 1.0  # without descriptors
_AGE_JITTER = 0.1  # so that clients do not all come back at once


class Http2Engine:
    """Serves rpcs on the sockets that it listens on or is given."""

    def __init__(self, services: RpcServices, settings: Settings, loop: EventLoop) -> None:
        self._age_s = settings.grpc_max_connection_age_s or float("inf")
        self._serving = serving_of(services, settings, loop)
        self._loop = loop
        self._loop.sweep = self._sweep
        self._listeners: list[tuple[socket.socket, Certificates | None]] = []
        self._thread = threading.Thread(target=self._run, name="http2", daemon=True)
        self._ended = threading.Event()
        self._stopping = False
        self._woke = True

    def add_insecure_port(self, address: str) -> int:
        return self._add_port(address, None)

    def add_secure_port(self, address: str, server_credentials: Certificates) -> int:
        return self._add_port(address, server_credentials)

    def adopt(self, sock: socket.socket, certificates: Certificates | None) -> str:
        """Serve on a socket that listens already; returns its address."""
        sock.setblocking(False)
        self._listeners.append((sock, certificates))
        name = sock.getsockname()
        return f"unix:{name}" if isinstance(name, str) else f"{name[0]}:{name[1]}"

    def start(self) -> None:
        for sock, certificates in self._listeners:
            self._loop.hub.handle(sock.fileno(), partial(self._accept, sock, certificates))
        self._thread.start()

    def stop(self, grace: float | None) -> threading.Event:
        if self._thread.ident is None:
            self._close_listeners()
            self._ended.set()
        self._loop.post(partial(self._begin_stop, grace))
        return self._ended

    @property
    def connected(self) -> bool:
        """Whether there are connections."""
        return bool(len(self._serving.connections))

    def lives(self) -> bool:
        """Whether the loop has turned since this was asked the last time."""
        woke, self._woke = self._woke, False
        self._loop.post(self._wakes)
        return woke

    def _wakes(self) -> None:
        self._woke = True

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            self._serving.growth.shutdown(wait=False)
            self._ended.set()

    # --- ports

    def _add_port(self, address: str, certificates: Certificates | None) -> int:
        bind = parse("grpc_bind", address)
        try:
            if bind.path:
                sock = socket.socket(socket.AF_UNIX)
                self._listen(sock, bind.path, certificates)
                return 0
            found = socket.getaddrinfo(
                bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            port = bind.port
            for family, kind, protocol, _, target in found:
                sock = socket.socket(family, kind, protocol)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
                self._listen(sock, (target[0], port), certificates)
                port = port or sock.getsockname()[1]
            return port
        except OSError as ex:
            raise RuntimeError(ex.strerror or "no such address") from None

    def _listen(
        self,
        sock: socket.socket,
        target: str | tuple[object, int],
        certificates: Certificates | None,
    ) -> None:
        try:
            sock.setblocking(False)
            sock.bind(target)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        self._listeners.append((sock, certificates))

    def _accept(self, listener: socket.socket, certificates: Certificates | None, _: int) -> None:
        for _turn in range(_ACCEPTS):
            try:
                sock, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as ex:
                if ex.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if not self._serving.connections.end_idle(monotonic()):
                        _log.warning("cannot accept connections now: %s", ex.strerror)
                        self._pause(listener, certificates)
                    return
                continue  # the client has gone already
            try:
                self._connected(sock, certificates)
            except OSError:
                sock.close()
            except Exception:  # of one client; the loop is all clients'
                _log.exception("unexpected error with a new connection")
                sock.close()

    def _pause(self, listener: socket.socket, certificates: Certificates | None) -> None:
        """The listener would be ready all the time."""
        self._loop.hub.unhandle(listener.fileno())

        def again() -> None:
            if not self._stopping:
                self._loop.hub.handle(
                    listener.fileno(), partial(self._accept, listener, certificates)
                )

        self._loop.at(monotonic() + _PAUSE_S, again)

    def _connected(self, sock: socket.socket, certificates: Certificates | None) -> None:
        connections = self._serving.connections
        if not connections.room_for(ConnectedClient(sock).number, monotonic()):
            _log.info("refused a connection: too many (max_connections)")
            flight_recorder.record("limit reached", "gRPC connections", "max_connections")
            sock.close()
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport: ConnectionTransport
        if certificates is not None and sock.family != socket.AF_UNIX:
            transport = TlsTransport(sock, certificates.context())
        else:
            transport = PlainTransport(sock)
        age_s = self._age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
        connections.add(ServerConnection(transport, self._serving, monotonic() + age_s))

    # --- time

    def _sweep(self, now: float) -> float:
        """Tick connections that are due; when to come again."""
        connections = self._serving.connections
        for connection in connections:
            if now >= connection.due or connection.touched:
                guarded(partial(_tick, connection, now))  # a defect with one is not all clients'
        return min((connection.due for connection in connections), default=float("inf"))

    # --- the end

    def _begin_stop(self, grace: float | None) -> None:
        self._close_listeners()
        if not grace:
            self._finish()
            return
        for connection in self._serving.connections:
            connection.drain()
        self._loop.at(monotonic() + grace, self._finish)

    def _close_listeners(self) -> None:
        self._stopping = True
        listeners, self._listeners = self._listeners, []
        for sock, _ in listeners:
            self._loop.hub.unhandle(sock.fileno())
            sock.close()

    def _finish(self) -> None:
        for connection in self._serving.connections:
            guarded(connection.terminate)
        self._loop.stop()


def _tick(connection: OpenConnection, now: float) -> None:
    connection.look(now)
    if now >= connection.due:
        connection.tick(now)
        connection.look(now)


class SocketCallers:
    """Who a call comes from: whoever is at the other end of its connection's own socket."""

    def of(self, context: RpcContext) -> Caller:
        """The caller of a call; nobody known if it is relayed for somebody else."""
        if isinstance(context, Http2Call) and not relayed(context):
            return context.owner.client.caller()
        return REMOTE
