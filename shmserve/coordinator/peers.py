"""Connections of the coordinator: non-blocking, bounded, one per process.

A peer that reads too slowly is closed, never waited for; what it missed it learns from its
next hello. A peer that sends what the protocol forbids is closed as well, alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.protocol import messages
from shmserve.protocol.messages import FromCoordinator
from shmserve.transport.channel import MAX_MESSAGE

_MAX_QUEUED = 1024  # messages a peer may leave unread beyond its socket's buffer
_BURST = 64  # messages taken from one peer before others get their turn


class Peer:
    """One connection. `process` and `role` are set by its hello."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid, self.uid, _ = struct.unpack("3i", raw)
        self.process = ""
        self.role = ""
        self._queue: deque[bytes] = deque()

    @property
    def backlogged(self) -> bool:
        return bool(self._queue)

    def send(self, message: FromCoordinator) -> None:
        """Send now or queue.

        Raises:
            PeerDied: the peer is gone.
            ProtocolViolation: it reads too slowly, or the message is too long for a packet.
        """
        data = messages.encode(message)
        if len(data) > MAX_MESSAGE:
            raise ProtocolViolation(f"a {type(message).__name__} of {len(data)} bytes is too long")
        if len(self._queue) >= _MAX_QUEUED:
            raise ProtocolViolation("it does not read its messages")
        self._queue.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it.

        Raises:
            PeerDied: the peer is gone.
        """
        while self._queue:
            try:
                self.sock.send(self._queue[0])
            except BlockingIOError:
                return
            except OSError as ex:
                raise PeerDied(f"the peer is gone: {ex.strerror}") from ex
            self._queue.popleft()

    def receive(self, buffer: memoryview) -> Iterator[memoryview]:
        """The messages that are there, each valid until the next; fds are refused by the kernel.

        Raises:
            PeerDied: EOF.
            ProtocolViolation: a message that is too long.
        """
        for _ in range(_BURST):
            try:
                size, _, flags, _ = self.sock.recvmsg_into([buffer])
            except BlockingIOError:
                return
            except OSError as ex:
                raise PeerDied(f"the peer is gone: {ex.strerror}") from ex
            if size == 0:
                raise PeerDied("the peer has closed its link")
            if flags & socket.MSG_TRUNC:
                raise ProtocolViolation("a message was too long")
            yield buffer[:size]

    def close(self) -> None:
        self.sock.close()


def accept(listener: socket.socket, refused: Callable[[int], None]) -> Peer | None:
    """The next connection of this user's or root's process; others are closed at once."""
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    peer = Peer(sock)
    if peer.uid not in (0, os.geteuid()):
        peer.close()
        refused(peer.uid)
        return None
    return peer
