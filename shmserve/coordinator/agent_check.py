"""Agent check for load balancers: tells every peer that connects how much of this host is free.

The protocol is HAProxy's agent check. The agent sends one line, such as ``75%``, and ends the
connection. The figure is a share of the weight that the balancer's configuration gives this host;
``0%`` means "send nothing now". The agent never sends ``drain`` or ``ready``, because both would
change settings that operators made in the balancer. Every peer that reaches the address gets the
answer: the figure is no secret.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence

from shmserve.errors import ConfigError
from shmserve.log_fields import log_fields
from shmserve.transport import listen_addresses

_log = logging.getLogger(__name__)

SETTING = "agent_bind"
_MAX_CONNECTIONS = 64  # answered connections still open, at most
_BURST = 16  # most connections accepted before other events get a turn
_PATIENCE_S = 1.0  # time for a peer to close
_KEPT_S = 0.1  # age up to which an answer is given to further peers
_READ_BYTES = 4096


class AgentConnection:
    """An answered connection, kept open until the peer closes. If the agent closed first, with
    unread bytes of the peer (``agent-send``) in the buffer, the kernel would discard the
    answer."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline


class AgentCheck:
    """Listeners and answered connections of the agent. The selector's data is the `AgentCheck` for
    a listener and an `AgentConnection` for a connection.

    Args:
        binds: addresses, as written in the settings.
        free: returns the free share of the host, in percent.
    """

    def __init__(
        self, binds: Sequence[str], free: Callable[[], int], selector: selectors.BaseSelector
    ) -> None:
        self._binds = binds
        self._free = free
        self._selector = selector
        self._connections: OrderedDict[AgentConnection, None] = OrderedDict()  # oldest first
        self._line, self._until = b"", 0.0
        self._opened = False
        self._listeners: list[socket.socket] = []

    def settle(self, now: float, on: bool) -> None:
        """Listen while `on`, and close connections whose peers did not close in time. `on` is true
        while all executors are known and this generation of the service serves."""
        if on != self._opened:
            self._opened = on
            for listener in self._listeners:
                self._selector.unregister(listener)
                listener.close()
            self._listeners = []
            for bind in self._binds if on else ():
                self._open(bind)
        while self._connections:
            oldest = next(iter(self._connections))
            if now < oldest.deadline:
                break
            self._end(oldest)

    def accept(self, listener: socket.socket, now: float) -> None:
        """Accept waiting connections, up to a limit per call, and answer each."""
        for _ in range(_BURST):
            try:
                sock, _peer = listener.accept()
            except OSError:  # no peer, a peer gone already, or no descriptor: the balancer retries
                return
            if len(self._connections) >= _MAX_CONNECTIONS:
                self._end(next(iter(self._connections)))
            self._tell(sock, now)

    def ready(self, connection: AgentConnection) -> None:
        """Read and discard bytes of the peer. End the connection if the peer has closed."""
        # ended earlier in the same turn of the loop, to make room
        if connection not in self._connections:
            return
        try:
            if connection.sock.recv(_READ_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._end(connection)

    def _open(self, bind: str) -> None:
        """Listen on one address. An address taken by another process since the start is logged and
        skipped."""
        try:
            address = listen_addresses.parse(SETTING, bind)
            for listener in listen_addresses.listeners(SETTING, address, _MAX_CONNECTIONS):
                self._selector.register(listener, selectors.EVENT_READ, self)
                self._listeners.append(listener)
        except (ConfigError, OSError) as ex:
            _log.error("%s: cannot listen", SETTING, extra=log_fields(address=bind, error=ex))

    def _tell(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        if now >= self._until:
            self._line, self._until = b"%d%%\n" % self._free(), now + _KEPT_S
        try:
            sock.send(self._line)  # the send buffer is empty, so the line fits
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return
        connection = AgentConnection(sock, now + _PATIENCE_S)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _end(self, connection: AgentConnection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.sock)
        connection.sock.close()
