"""Accepting connections, for every protocol: when, how many, and what to do without room.

A new connection wakes all processes that share a listening socket. To spread lasting connections
evenly, a process with connections waits a moment, in which idle processes go first, and accepts
few connections at a time. The process does not wait to fill the room of connections that have just
ended. If clients connect and close, a pause for each connection would be slower than the clients
and would fill the listener's backlog. Ends are counted, because several may lie between two
accepts: remembering only the last end made clients wait three times as long
(`bench.new_connections`).

A process without descriptors pauses, since the loop would report the waiting connections all the
time.
"""

import errno
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Generic

from shmserve.frontends.connections.open_connections import C, OpenConnections
from shmserve.frontends.connections.refusals import Refusals
from shmserve.frontends.descriptors import READ
from shmserve.frontends.hub import Hub
from shmserve.transport.stranger_channel import pass_descriptors

_ACCEPTS = 64  # connections in a turn of the loop, without other processes
_ACCEPT_DELAY_S = 0.001  # shortest wait of the loop
_TURNS = 2  # turns of the loop in which a new connection begins and reads an end that has arrived
_VACANCIES = 2  # largest number kept after an accept: other processes take the rest
_VACANT_S = 1.0  # older vacancies do not count, so lasting connections are soon spread again

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # after an error, or without descriptors

Connect = Callable[[socket.socket, Any], C]
"""Makes a connection of an accepted socket and the client's address."""


class _NoDescriptor(Exception):
    """The process has no descriptor left for a connection."""


class Acceptor(Generic[C]):
    """The listening sockets of one process, served by its loop until `stop`.

    Args:
        hub: the process's loop.
        connections: list of open connections, to which accepted connections are added.
        number_of: returns the number of a socket's caller, for the callers' shares.
        refusals: answers connections for which there is no room.
        log: the protocol's logger.
        spread: whether other processes accept from the same sockets.
    """

    def __init__(
        self,
        hub: Hub,
        connections: OpenConnections[C],
        number_of: Callable[[socket.socket], int],
        refusals: Refusals,
        log: Any,
        spread: bool,
    ) -> None:
        self._hub = hub
        self._connections = connections
        self._number_of = number_of
        self._refusals = refusals
        self._log = log
        self._spread = spread
        self._listeners: list[socket.socket] | None = []  # None after `stop`
        self._filled = 0  # ends in `connections.ended` whose room has been taken again
        self._short_of_descriptors = False

    def listen(self, listener: socket.socket, connect: Connect[C]) -> None:
        """Accept from a listening socket. Call in the loop's thread, or before the loop runs."""
        assert self._listeners is not None
        listener.setblocking(False)
        if listener.family == socket.AF_UNIX:
            pass_descriptors(listener, False)
        self._listeners.append(listener)
        self._hub.handle(listener.fileno(), partial(self._ready, listener, connect))

    def stop(self) -> None:
        """Close the listening sockets. Idempotent."""
        listeners, self._listeners = self._listeners or [], None
        for listener in listeners:
            # epoll keeps a closed socket that other processes have open
            self._hub.unhandle(listener.fileno())
            listener.close()

    def _ready(self, listener: socket.socket, connect: Connect[C], _events: int) -> None:
        crowded = self._spread and len(self._connections) > 0 and not self._has_vacancy()
        if crowded or not self._accept_some(listener, connect):
            self._hub.change(listener.fileno(), 0)
            self._hub.enter(self._accept_later, listener, connect, crowded)

    def _accept_later(self, listener: socket.socket, connect: Connect[C], crowded: bool) -> None:
        """Let other processes go first if this process is `crowded`, else pause."""
        if crowded:
            self._await_vacancy()
        if not crowded or not self._accept_some(listener, connect):
            self._hub.sleep(_PAUSE_S)
            self._refusals.close()
        if self._listeners is not None:
            self._hub.change(listener.fileno(), READ)

    def _has_vacancy(self) -> bool:
        """Return True if a connection has ended a short while ago and its room is still free."""
        lately = monotonic() <= self._connections.ended_at + _VACANT_S
        return lately and self._connections.ended > self._filled

    def _await_vacancy(self) -> None:
        """Let new connections run, which may have ended already. If no connection ends, wait for
        other processes."""
        for _ in range(_TURNS):
            self._hub.pause()
            if self._has_vacancy():
                return
        self._hub.sleep(_ACCEPT_DELAY_S)

    def _accept_some(self, listener: socket.socket, connect: Connect[C]) -> bool:
        """Accept some of the waiting connections. Return False if a pause must follow."""
        try:
            for _ in range(len(self._connections) // 64 + 1 if self._spread else _ACCEPTS):
                if self._listeners is None or not self._accept(listener, connect):
                    break
        except _NoDescriptor:
            if not self._short_of_descriptors:
                self._short_of_descriptors = True
                self._log.warning(
                    "No descriptor is left for connections: %d", len(self._connections)
                )
            return False
        except Exception:  # of one connection, or of a connection that was to make room
            self._log.exception("Error while accepting connections")
            return False
        return True

    def _accept(self, listener: socket.socket, connect: Connect[C]) -> bool:
        """Accept or refuse a connection. Return False if no connection waits. Raise _NoDescriptor
        if the connection still waits, or was refused with the spare descriptor."""
        try:
            self._take(*listener.accept(), connect)
            return True
        except OSError as ex:  # taken by another process, closed already, or no descriptor left
            if ex.errno not in _NO_DESCRIPTOR:
                return False
        if not self._connections.end_longest_idle(monotonic()):
            self._refusals.refuse_next(listener)
            raise _NoDescriptor
        try:
            self._take(*listener.accept(), connect)
            return True
        except OSError:  # the idle connection has not closed its descriptor yet
            raise _NoDescriptor from None

    def _take(self, sock: socket.socket, client: Any, connect: Connect[C]) -> None:
        """Make a connection of an accepted socket, or refuse the socket."""
        self._short_of_descriptors = False
        if sock.family == socket.AF_UNIX:  # a byte out of band would look like input for ever
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        try:
            caller = self._number_of(sock)
            if not self._connections.make_room(caller, monotonic()):
                self._refusals.refuse(sock)
                self._connections.count_end()
                return
            self._connections.add(connect(sock, client), caller)
            ended = self._connections.ended
            self._filled = min(max(self._filled + 1, ended - _VACANCIES), ended)
        except BaseException:
            sock.close()
            raise
