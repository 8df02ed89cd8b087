"""Channels: Unix-domain SEQPACKET connections. One message, one packet.

A channel is fence, wake-up and death notice in one: the system call orders the
shared-memory writes before it, and a peer that dies is an EOF. SCM_RIGHTS carries
fds, SO_PEERCRED tells who is there. OS errors become the project's errors here.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence

from shmserve.errors import DeadlineExceeded, PeerDied, ProtocolViolation, TooLarge

MAX_MESSAGE = 128 * 1024  # below the default SO_SNDBUF of 208 KiB
MAX_FDS = 64
ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)
_SEND_TIMEOUT_S = 5.0  # a peer that reads nothing for so long is as good as dead
# As plain integers: operators of the socket module's flags run in Python, on every message.
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_NOW = int(socket.MSG_DONTWAIT)
_FLAGS_NOW = _FLAGS | _NOW
_INCOMPLETE = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))


class Channel:
    """One connection. Not thread-safe for two receivers; sends are atomic packets."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT_S))
        self._socket = sock
        self._buffer = bytearray(MAX_MESSAGE)
        self._view = memoryview(self._buffer)
        self._timeout: float | None = None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.peer_pid, self.peer_uid, _ = struct.unpack("3i", credentials)

    @classmethod
    def connect(cls, path: str, timeout_s: float = 5.0) -> Channel:
        """Connect to a listener.

        Raises:
            PeerDied: nobody listens there, or not within the timeout.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
        except OSError as ex:
            sock.close()
            raise PeerDied(f"cannot connect: {ex.strerror or ex}") from ex
        return cls(sock)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            PeerDied: the other end is gone or does not read.
            TooLarge: the message exceeds `MAX_MESSAGE`.
        """
        check_size(data)
        try:
            self._transmit(data, fds, 0)
        except OSError as ex:
            raise PeerDied(f"the peer is gone: {ex.strerror or ex}") from ex

    def send_now(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one message if the peer has room for it, else False; raises as `send` does."""
        check_size(data)
        try:
            self._transmit(data, fds, _NOW)
        except BlockingIOError:
            return False
        except OSError as ex:
            raise PeerDied(f"the peer is gone: {ex.strerror or ex}") from ex
        return True

    def _transmit(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        if fds:
            rights = array.array("i", fds)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            self._socket.sendmsg([data], ancillary, flags)
        else:
            self._socket.send(data, flags)

    def receive(self, timeout_s: float | None = None) -> tuple[memoryview, list[int]]:
        """Wait for one message; the view is valid until the next receive.

        Raises:
            PeerDied: EOF.
            DeadlineExceeded: nothing came within the timeout.
            ProtocolViolation: a message that is too long.
        """
        if timeout_s != self._timeout:  # once per change, not once per call
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s or 0.0)
            )
            self._timeout = timeout_s
        received = self._receive(_FLAGS)
        if received is None:
            raise DeadlineExceeded(f"no message from pid {self.peer_pid} within {timeout_s} s")
        return received

    def receive_now(self) -> tuple[memoryview, list[int]] | None:
        """One message if there is one, else None; raises as `receive` does."""
        return self._receive(_FLAGS_NOW)

    def _receive(self, flags: int) -> tuple[memoryview, list[int]] | None:
        try:
            size, ancillary, got, _ = self._socket.recvmsg_into([self._view], ANCILLARY, flags)
        except BlockingIOError:
            return None
        except OSError as ex:
            raise PeerDied(f"the peer is gone: {ex.strerror or ex}") from ex
        fds = received_fds(ancillary) if ancillary else []
        if size == 0 or got & _INCOMPLETE:
            for fd in fds:
                os.close(fd)
            if size == 0:
                raise PeerDied("the peer has closed the channel")
            raise ProtocolViolation("a message was too long or carried too many fds")
        return self._view[:size], fds

    def refuse(self) -> None:
        """Take no further message: the peer's sends fail from now on.

        What it has sent before can still be received; then `receive` tells of an EOF.
        """
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RD)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def check_size(data: bytes) -> None:
    """Raises TooLarge: the message exceeds `MAX_MESSAGE`."""
    if len(data) > MAX_MESSAGE:
        raise TooLarge(
            f"the request's names, shapes and parameters take {len(data)} bytes, "
            f"more than the {MAX_MESSAGE} that can be passed on"
        )


def received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message; they are the caller's to close."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def listen(path: str, backlog: int = 128) -> socket.socket:
    """A SEQPACKET listener at `path`, for this user only; a stale socket file is replaced."""
    if len(os.fsencode(path)) > 107:
        raise OSError(f"the run directory's path is too long for a Unix socket: {len(path)} bytes")
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(backlog)
    sock.setblocking(False)
    return sock


def refuse(listener: socket.socket) -> None:
    """Take no further connection; those made before can still be accepted."""
    listener.shutdown(socket.SHUT_RD)


def accept(listener: socket.socket) -> Channel | None:
    """The next connection of a same-user (or root) peer, or None if there is none."""
    try:
        sock, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError as ex:
        if ex.errno == errno.EINVAL:  # `refuse` was called, and nobody is left in its queue
            return None
        raise
    channel = Channel(sock)
    if channel.peer_uid not in (0, os.geteuid()):
        channel.close()
        return None
    return channel
