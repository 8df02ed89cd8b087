"""The engine: ports, the loop's thread, and shutdown."""

import logging
import random
import socket
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.frontends.caller_numbers import of_socket
from shmserve.frontends.connections.acceptor import Acceptor
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.connections.refusals import Refusals
from shmserve.frontends.grpc.callers import relayed
from shmserve.frontends.grpc.handlers import RpcServices
from shmserve.frontends.grpc.http2_engine import transports
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop, guarded
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.server_connection import ServerConnection
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.transport.trust.peer_credentials import REMOTE
from shmserve.transport.trust.tls import Certificates

_log = logging.getLogger("shmserve.grpc")

_AGE_JITTER = 0.1  # fraction; keeps clients from reconnecting all at once
_STOPS = "the server is stopping"


class Http2Engine:
    """Serves rpcs on listening sockets."""

    def __init__(self, services: RpcServices, settings: Settings, loop: EventLoop) -> None:
        self._age_s = settings.grpc_max_connection_age_s or float("inf")
        self._serving = Serving(services, settings, loop)
        self._loop = loop
        refusals = Refusals(loop.hub, "gRPC connections", b"")
        self._connections: OpenConnections[ServerConnection] = self._serving.connections
        self._acceptor = Acceptor(loop.hub, self._connections, of_socket, refusals, _log, False)
        self._thread = threading.Thread(target=self._run, name="http2", daemon=True)
        self._ended = threading.Event()
        self._woke = True

    def adopt(self, sock: socket.socket, certificates: Certificates | None) -> str:
        """Serve on a listening socket. Call before `start`. Return the socket's address."""
        name = sock.getsockname()
        self._acceptor.listen(sock, partial(self._connect, certificates))
        return f"unix:{name}" if isinstance(name, str) else f"{name[0]}:{name[1]}"

    def start(self, failed: Callable[[], object] = lambda: None) -> None:
        """Serve. `failed`: called when an error has ended the loop and all calls."""
        self._failed = failed
        self._thread.start()

    def stop(self, grace: float | None) -> threading.Event:
        if self._thread.ident is None:
            self._acceptor.stop()
            self._ended.set()
        self._loop.post(partial(self._begin_stop, grace))
        return self._ended

    @property
    def connected(self) -> bool:
        """True if there are connections."""
        return bool(self._connections)

    def lives(self) -> bool:
        """Return True if the loop has turned since the previous call, else False."""
        woke, self._woke = self._woke, False
        self._loop.post(self._wakes)
        return woke

    def _wakes(self) -> None:
        self._woke = True

    def _run(self) -> None:
        try:
            self._loop.run(self._sweep)
        except BaseException:
            try:
                _log.critical("the loop has failed", exc_info=True)
            finally:  # memory may lack for the line
                self._failed()
        finally:
            self._serving.growth.shutdown(wait=False)
            self._ended.set()

    def _connect(
        self, certificates: Certificates | None, sock: socket.socket, _client: Any
    ) -> ServerConnection:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport: transports.ConnectionTransport
        if certificates is not None and sock.family != socket.AF_UNIX:
            transport = transports.TlsTransport(sock, certificates.context())
        else:
            transport = transports.PlainTransport(sock)
        age_s = self._age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
        return ServerConnection(transport, self._serving, monotonic() + age_s)

    # --- time

    def _sweep(self, now: float) -> float:
        """Tick connections that are due. Return the time of the next sweep."""
        for connection in self._connections:
            if now >= connection.due or connection.touched:
                # a bug in a tick must not stop the others
                guarded(partial(_tick, connection, now))
        return min((connection.due for connection in self._connections), default=float("inf"))

    # --- the end

    def _begin_stop(self, grace: float | None) -> None:
        self._acceptor.stop()
        if not grace:
            self._finish()
            return
        for connection in self._connections:
            connection.drain(_STOPS)
        self._loop.at(monotonic() + grace, self._finish)

    def _finish(self) -> None:
        for connection in self._connections:
            guarded(partial(connection.terminate, _STOPS))
        self._loop.stop()


def _tick(connection: ServerConnection, now: float) -> None:
    connection.look(now)
    if now >= connection.due:
        connection.tick(now)
        connection.look(now)


def caller_by_socket(context: RpcContext) -> Caller:
    """Return the peer of a call's own socket; `REMOTE` if a proxy relays the call."""
    if isinstance(context, Http2Call) and not relayed(context):
        return context.owner.client.caller()
    return REMOTE
