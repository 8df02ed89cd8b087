"""Connections of the coordinator: non-blocking, bounded, one per process.

A peer that reads too slowly is closed, never waited for; what it missed it learns from its
next hello. A peer that sends what the protocol forbids is closed as well, alone.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.protocol import messages
from shmserve.protocol.messages import FromCoordinator
from shmserve.transport.channel import ANCILLARY, MAX_MESSAGE, received_fds

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
        self._queue: deque[tuple[bytes, list[int]]] = deque()

    @property
    def backlogged(self) -> bool:
        return bool(self._queue)

    def send(self, message: FromCoordinator, fds: Sequence[int] = ()) -> None:
        """Send now or queue; of fds copies ride along.

        Raises:
            PeerDied: the peer is gone.
            ProtocolViolation: it reads too slowly, or the message is too long for a packet.
        """
        data = messages.encode(message)
        if len(data) > MAX_MESSAGE:
            raise ProtocolViolation(f"a {type(message).__name__} of {len(data)} bytes is too long")
        if len(self._queue) >= _MAX_QUEUED:
            raise ProtocolViolation("it does not read its messages")
        self._queue.append((data, [os.dup(fd) for fd in fds]))
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it.

        Raises:
            PeerDied: the peer is gone.
        """
        while self._queue:
            data, fds = self._queue[0]
            try:
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    self.sock.sendmsg([data], [rights])
                else:
                    self.sock.send(data)
            except BlockingIOError:
                return
            except OSError as ex:
                raise PeerDied(f"the peer is gone: {ex.strerror}") from ex
            self._queue.popleft()
            for fd in fds:
                os.close(fd)

    def receive(self, buffer: memoryview) -> Iterator[tuple[memoryview, list[int]]]:
        """The messages that are there, each valid until the next, with fds to be closed.

        Raises:
            PeerDied: EOF.
            ProtocolViolation: a message that is too long.
        """
        for _ in range(_BURST):
            try:
                size, ancillary, flags, _ = self.sock.recvmsg_into(
                    [buffer], ANCILLARY, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left messages unread; told once, before its own
                continue
            except OSError as ex:
                raise PeerDied(f"the peer is gone: {ex.strerror}") from ex
            fds = received_fds(ancillary) if ancillary else []
            if size == 0 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                for fd in fds:
                    os.close(fd)
                if size == 0:
                    raise PeerDied("the peer has closed its link")
                raise ProtocolViolation("a message was too long or carried too many fds")
            yield buffer[:size], fds

    def close(self) -> None:
        self.sock.close()
        while self._queue:
            for fd in self._queue.popleft()[1]:
                os.close(fd)


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
