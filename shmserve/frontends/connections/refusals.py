"""Refusals of connections for which there is no room, with the reason for the client."""

import os
import socket
from collections import deque
from contextlib import suppress

from shmserve.frontends.hub import Hub
from shmserve.observe import flight_recorder

_CLOSES_S = 1.0  # seconds for a client to read the answer
_SOCKETS = 128  # limit of refused sockets that wait to be closed


class Refusals:
    """Refused connections of one process, closed a moment after the answer: closing over unread
    data would take the answer back.

    A spare descriptor is kept to refuse a connection when no other descriptor is left. If the
    protocol has no answer, closing would tell the client nothing, so such a connection waits in
    the listener's backlog.

    `hub`: the process's loop. `kind`: name of the connections, for the flight recorder. `answer`:
    bytes for a refused client; if empty, the connection is closed at once.
    """

    def __init__(self, hub: Hub, kind: str, answer: bytes) -> None:
        self._hub = hub
        self._kind = kind
        self._answer = answer
        self._refused: deque[socket.socket] = deque()
        self._spare: int | None = None
        self._closes = False  # a greenlet will close the refused sockets
        self._take_spare()

    def refuse(self, sock: socket.socket) -> None:
        """Answer a client for whom there is no room."""
        limits = "max_connections, descriptors" if self._answer else "max_connections"
        flight_recorder.record("limit reached", self._kind, limits)
        if not self._answer:
            sock.close()
            return
        with suppress(OSError):
            sock.send(self._answer, socket.MSG_DONTWAIT)
            sock.shutdown(socket.SHUT_WR)
        self._refused.append(sock)
        if len(self._refused) > _SOCKETS:
            self._refused.popleft().close()
        self._close_soon()

    def refuse_next(self, listener: socket.socket) -> None:
        """Refuse a waiting connection with the spare descriptor, if the spare is free."""
        if self._spare is None:
            return
        os.close(self._spare)
        self._spare = None
        try:
            self.refuse(listener.accept()[0])
        except OSError:  # the client has left
            self._close_soon()

    def close(self) -> None:
        """Close refused connections, and take a spare descriptor again if possible."""
        while self._refused:
            self._refused.popleft().close()
        self._take_spare()

    def _close_soon(self) -> None:
        if not self._closes:
            self._closes = True
            self._hub.spawn(self._close_later)

    def _close_later(self) -> None:
        while self._refused or self._spare is None:
            self._hub.sleep(_CLOSES_S)
            self.close()
        self._closes = False

    def _take_spare(self) -> None:
        if self._spare is None and self._answer:
            with suppress(OSError):  # the next `close` tries again
                self._spare = os.open(os.devnull, os.O_RDONLY)
