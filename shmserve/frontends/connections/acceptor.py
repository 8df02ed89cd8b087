"""Accepting connections, for every protocol: when, how many, and what if there is no room.

Listening sockets that several processes share wake all of them up for each new connection. To
spread lasting connections evenly, a process that has connections waits a moment, in which idle
processes go first, and accepts few at a time. It does not wait to fill the room of connections that
have just ended: with clients that connect and close, a pause for each would be slower than the
clients, and fill the listener's backlog. Ends are counted, because several may lie between two
accepts: remembering only the last made clients wait three times as long (`bench.new_connections`).

A process without descriptors would be told of the waiting connections all the time, so it pauses.
"""

from __future__ import annotations

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

_ACCEPTS = 64  # in a turn of the loop
_ACCEPT_DELAY_S = 0.001  # the least that the loop can wait
_TURNS = 2  # of the loop: a connection begins, and reads the end that was there already
_VACANCIES = 2  # that are left after an accept at most: room is for other processes, too
_VACANT_S = 1.0  # lasting connections are soon spread again after the end of others

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # without descriptors, or after an error

Connect = Callable[[socket.socket, Any], C]
"""Makes a connection of an accepted socket and the client's address."""


class _NoDescriptor(Exception):
    """The process has no descriptor left for a connection."""


class Acceptor(Generic[C]):
    """The listening sockets of one process, served by its loop until `stop`.

    Args:
        hub: the process's loop.
        connections: the book of open connections, which accepted ones are added to.
        number_of: returns the number of a socket's caller, for the callers' shares.
        refusals: answers the connections that there is no room for.
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
        self._listeners: list[socket.socket] | None = []  # None: stopped
        self._filled = 0  # of `connections.ended`: those whose room has been taken again
        self._short_of_descriptors = False

    def listen(self, listener: socket.socket, connect: Connect[C]) -> None:
        """Accept connections from a listening socket. In the loop's thread, or before it runs."""
        assert self._listeners is not None
        listener.setblocking(False)
        self._listeners.append(listener)
        self._hub.handle(listener.fileno(), partial(self._ready, listener, connect))

    def stop(self) -> None:
        """Close the listening sockets. Idempotent."""
        listeners, self._listeners = self._listeners or [], None
        for listener in listeners:
            self._hub.unhandle(listener.fileno())  # other processes may have the socket, too
            listener.close()

    def _ready(self, listener: socket.socket, connect: Connect[C], _events: int) -> None:
        crowded = self._spread and len(self._connections) > 0 and not self._has_vacancy()
        if crowded or not self._accept_some(listener, connect):
            self._hub.change(listener.fileno(), 0)
            self._hub.enter(self._accept_later, listener, connect, crowded)

    def _accept_later(self, listener: socket.socket, connect: Connect[C], crowded: bool) -> None:
        """Let other processes go first where this one is `crowded`, else pause."""
        if crowded:
            self._await_vacancy()
        if not crowded or not self._accept_some(listener, connect):
            self._hub.sleep(_PAUSE_S)
            self._refusals.close()
        if self._listeners is not None:
            self._hub.change(listener.fileno(), READ)

    def _has_vacancy(self) -> bool:
        """Return whether a connection has ended a short while ago, and its room is not taken."""
        lately = monotonic() <= self._connections.ended_at + _VACANT_S
        return lately and self._connections.ended > self._filled

    def _await_vacancy(self) -> None:
        """Wait for connections that were accepted just now, which may have ended already; if none
        has, wait for other processes."""
        for _ in range(_TURNS):
            self._hub.pause()
            if self._has_vacancy():
                return
        self._hub.sleep(_ACCEPT_DELAY_S)

    def _accept_some(self, listener: socket.socket, connect: Connect[C]) -> bool:
        """Accept some of the waiting connections; return False if a pause has to follow."""
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
        except Exception:  # of one connection, or of one that was to make room for it
            self._log.exception("Error while accepting connections")
            return False
        return True

    def _accept(self, listener: socket.socket, connect: Connect[C]) -> bool:
        """Accept or refuse a connection; return False if none waits.

        Raises:
            _NoDescriptor: the connection waits on, or was refused in the spare descriptor's place.
        """
        try:
            self._take(*listener.accept(), connect)
            return True
        except OSError as ex:  # taken by another process, gone already, or no descriptor left
            if ex.errno not in _NO_DESCRIPTOR:
                return False
        if not self._connections.end_longest_idle(monotonic()):
            self._refusals.refuse_next(listener)
            raise _NoDescriptor
        try:
            self._take(*listener.accept(), connect)
            return True
        except OSError:  # the descriptor that is given up is not free yet
            raise _NoDescriptor from None

    def _take(self, sock: socket.socket, client: Any, connect: Connect[C]) -> None:
        """Make a connection of an accepted socket, or refuse it."""
        self._short_of_descriptors = False
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
