"""The agent that load balancers ask: who connects is told how much of this host is free.

HAProxy's agent protocol: one line, such as ``75%``, of the weight that the balancer's configuration
gives this host, and the connection ends. ``0%``: send nothing now. It says neither ``drain`` nor
``ready``: those change what operators have set in the balancer itself. Whoever reaches the address
is told; it is no secret.
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
_MOST = 64  # connections that have been answered and whose peers have not closed them
_BURST = 16  # taken at a time before others have their turn
_PATIENCE_S = 1.0  # for a peer to close
_KEPT_S = 0.1  # an answer, for whoever asks within this
_READ_BYTES = 4096


class AgentConnection:
    """One that has been told. It is not closed at once: what its peer has sent (``agent-send``) and
    nobody has read would have the kernel take the answer back."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline


class AgentCheck:
    """The selector's data is this for its listeners, an `AgentConnection` else.

    Args:
        binds: addresses, as settings have them.
        free: how much of the host is free, in percent.
    """

    def __init__(
        self, binds: Sequence[str], free: Callable[[], int], selector: selectors.BaseSelector
    ) -> None:
        self._binds = binds
        self._free = free
        self._selector = selector
        self._connections: OrderedDict[AgentConnection, None] = OrderedDict()  # the oldest first
        self._line, self._until = b"", 0.0
        self._opened = False
        self._listeners: list[socket.socket] = []

    def settle(self, now: float, on: bool) -> None:
        """Listen while it is `on`: it is known what there is, and this generation of the service is
        the one that serves. End whose peer does not close."""
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
        """Tell the next that connect."""
        for _ in range(_BURST):
            try:
                sock, _peer = listener.accept()
            except OSError:  # nobody, gone already, or no descriptor: the balancer asks again
                return
            if len(self._connections) >= _MOST:
                self._end(next(iter(self._connections)))
            self._tell(sock, now)

    def ready(self, connection: AgentConnection) -> None:
        """A peer has said something, which does not matter, or has closed."""
        if connection not in self._connections:  # ended for another, in the same turn of the loop
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
        """An address that is lost to somebody else since the start costs the agent alone."""
        try:
            address = listen_addresses.parse(SETTING, bind)
            for listener in listen_addresses.listeners(SETTING, address, _MOST):
                self._selector.register(listener, selectors.EVENT_READ, self)
                self._listeners.append(listener)
        except (ConfigError, OSError) as ex:
            _log.error("%s: cannot listen", SETTING, extra=log_fields(address=bind, error=ex))

    def _tell(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        if now >= self._until:
            self._line, self._until = b"%d%%\n" % self._free(), now + _KEPT_S
        try:
            sock.send(self._line)  # into an empty buffer
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
