"""Connections of the coordinator: non-blocking, bounded, one per process.

The coordinator closes a peer that reads too slowly and never waits. After its next hello the peer
gets the current state. A peer that breaks the protocol is closed too, without effect on other
peers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence

from shmserve.errors import ProtocolViolation
from shmserve.protocol.control import messages
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.transport.channel import MAX_MESSAGE, Channel, close_all

_log = logging.getLogger(__name__)

_MAX_QUEUED = 1024  # most messages queued beyond the socket's buffer
_BURST = 64  # most messages taken from a peer before other peers get a turn


class ProcessConnection:
    """Connection of a process. `process` and `role` are empty until the hello."""

    def __init__(self, sock: socket.socket, buffer: memoryview | None = None) -> None:
        self.sock = sock
        self._channel = Channel(sock, buffer)
        self.pid, self.uid = self._channel.peer_pid, self._channel.peer_uid
        self.process = ""
        self.role = ""
        self._queue: deque[tuple[bytes, list[int]]] = deque()

    def greeted(self, process: str, role: str) -> None:
        """Set process and role from the hello. Both are emptied when the process has a newer
        connection."""
        self.process, self.role = process, role

    @property
    def backlogged(self) -> bool:
        return bool(self._queue)

    def send(self, message: FromCoordinator, fds: Sequence[int] = ()) -> None:
        """Send now, or queue. Copies of the descriptors are sent along.

        Raises:
            PeerDied: the peer is gone.
            ProtocolViolation: the peer reads too slowly, or the message is too long for a packet.
        """
        data = messages.encode(message)
        if len(data) > MAX_MESSAGE:
            raise ProtocolViolation(f"a {type(message).__name__} of {len(data)} bytes is too long")
        if len(self._queue) >= _MAX_QUEUED:
            raise ProtocolViolation("it does not read its messages")
        self._queue.append((data, [os.dup(fd) for fd in fds]))
        self.flush()

    def flush(self) -> None:
        """Send queued messages until the socket's buffer is full.

        Raises:
            PeerDied: the peer is gone.
        """
        while self._queue:
            data, fds = self._queue[0]
            if not self._channel.send(data, fds, wait=False):
                return
            self._queue.popleft()
            close_all(fds)

    def receive(self) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield received messages, each valid until the next, with descriptors for the caller to
        close.

        Raises:
            PeerDied: EOF.
            ProtocolViolation: a message is too long.
        """
        for _ in range(_BURST):
            received = self._channel.receive_within(0.0)
            if received is None:
                return
            yield received

    def close(self) -> None:
        self._channel.close()
        while self._queue:
            close_all(self._queue.popleft()[1])


def accept(listener: socket.socket, buffer: memoryview) -> ProcessConnection | None:
    """Accept the next connection. Return None if no peer waits, or if the peer runs as neither
    this user nor root.

    All connections receive into `buffer`.
    """
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    connection = ProcessConnection(sock, buffer)
    if connection.uid not in (0, os.geteuid()):
        connection.close()
        _log.warning("refused a connection from another user, uid %d", connection.uid)
        return None
    return connection
