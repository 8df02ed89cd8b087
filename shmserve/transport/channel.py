"""Channels: Unix-domain SEQPACKET connections. One message, one packet.

A channel is fence, wake-up and death notice in one: the system call orders the shared-memory
writes before it, and a peer that dies is an EOF. SCM_RIGHTS carries fds, and SO_PEERCRED tells the
peer's pid and uid. OS errors become the project's errors here.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf

from shmserve import waiting
from shmserve.errors import DeadlineExceeded, PeerDied, ProtocolViolation, TooLarge
from shmserve.waiting import DescriptorWait, ThreadWaiter, installed

MAX_MESSAGE = 128 * 1024  # below the default SO_SNDBUF of 208 KiB
MAX_FDS = 64
ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)
_FULL_S = 0.005  # pause before a full backlog is tried again
_SEND_TIMEOUT_S = 5.0  # a peer that reads nothing for so long is as good as dead
# As plain integers: operators of the socket module's flags run in Python, on every message.
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_NOW = int(socket.MSG_DONTWAIT)
_FLAGS_NOW = _FLAGS | _NOW
_INCOMPLETE = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


def _timeval(seconds: float) -> bytes:
    """Return a limit as a socket option takes it: 0 is no limit, so shorter ones become 1 us."""
    return struct.pack("ll", *divmod(max(1, int(seconds * 1_000_000)) if seconds else 0, 1_000_000))


def message_buffer() -> memoryview:
    """Return a buffer for one message. Only pages that messages have filled take memory."""
    return memoryview(mmap.mmap(-1, MAX_MESSAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Channel:
    """Connection to another process. One thread at a time may receive; sends are atomic packets.

    Args:
        sock: connected socket; the channel owns and closes it.
        buffer: receives messages. Channels that are read in turn may share a buffer.
        close: closes descriptors of a broken message, which no caller gets.

    Attributes:
        readiness: waits for a message where the thread must not block; None until first needed.
    """

    def __init__(
        self,
        sock: socket.socket,
        buffer: memoryview | None = None,
        close: Callable[[list[int]], None] | None = None,
    ) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT_S))
        self._socket = sock
        self._view = message_buffer() if buffer is None else buffer
        self._close_fds = close or close_all
        self._timeout_s: float | None = None
        self.readiness: DescriptorWait | None = None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.peer_pid, self.peer_uid, _ = struct.unpack("3i", credentials)

    @classmethod
    def connect(cls, path: str, timeout_s: float = 5.0) -> Channel:
        """Connect to a listener. Raise PeerDied if no process listens there, or none accepts within
        the timeout."""
        end = time.monotonic() + timeout_s
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as ex:  # no descriptor is left
            raise PeerDied(f"cannot connect: {ex.strerror or ex}") from ex
        try:
            sock.settimeout(timeout_s)
            while True:
                try:
                    sock.connect(path)
                    return cls(sock)
                except BlockingIOError:  # the backlog is full, which `connect` reports at once
                    if time.monotonic() >= end:
                        raise
                    waiting.sleep(_FULL_S)
        except OSError as ex:
            sock.close()
            raise PeerDied(f"cannot connect: {ex.strerror or ex}") from ex

    def send(self, data: bytes, fds: Sequence[int] = (), wait: bool = True) -> bool:
        """Send a message. Return False if `wait` is False and the peer has no room for the message.
        Raise PeerDied if the peer is gone, or has read nothing for 5 s. Raise TooLarge if the
        message exceeds `MAX_MESSAGE`."""
        if len(data) > MAX_MESSAGE:
            raise too_large(data)
        waiter = installed.waiter
        flags = 0 if wait and waiter is None else _NOW
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self._socket.sendmsg([data], [rights], flags)
            else:
                self._socket.send(data, flags)
        except OSError as ex:
            if isinstance(ex, BlockingIOError):
                if not wait:
                    return False
                if waiter is not None and (self.readiness or self.watch(waiter)).wait(
                    time.monotonic() + _SEND_TIMEOUT_S, select.EPOLLOUT
                ):
                    return self.send(data, fds)
            raise PeerDied(f"the peer is gone: {ex.strerror or ex}") from ex
        return True

    def receive(self, timeout_s: float | None = None) -> tuple[memoryview, list[int]]:
        """Wait for a message. The returned view is valid until the next message. Raise
        DeadlineExceeded if nothing came within the timeout. Raise other errors as
        `receive_within`."""
        received = self.receive_within(timeout_s)
        if received is None:
            raise DeadlineExceeded(f"no message from pid {self.peer_pid} within {timeout_s} s")
        return received

    def receive_within(
        self, timeout_s: float | None = 0.0, ancillary_space: int = ANCILLARY
    ) -> tuple[memoryview, list[int]] | None:
        """Return a message that has come or comes within the timeout, else None. A timeout of None
        is unlimited.

        The view is valid until the next message. The caller owns the descriptors.

        Raise PeerDied at EOF, and ProtocolViolation for a message that is too long, or with too
        many descriptors.
        """
        flags = _FLAGS_NOW
        waiter = installed.waiter if timeout_s != 0.0 else None
        if waiter is not None:
            deadline = inf if timeout_s is None else time.monotonic() + timeout_s
            if not (self.readiness or self.watch(waiter)).wait(deadline):
                return None
        elif timeout_s != 0.0:
            flags = _FLAGS
            if timeout_s != self._timeout_s:  # only when the timeout changes, not on every call
                limit = _timeval(timeout_s or 0.0)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                self._timeout_s = timeout_s
        try:
            size, ancillary, got, _ = self._socket.recvmsg_into(
                [self._view], ancillary_space, flags
            )
        except BlockingIOError:
            return None
        # The peer closed with messages unread. Linux reports this once, before the peer's last
        # messages.
        except ConnectionResetError:
            return self.receive_within(timeout_s, ancillary_space)
        except OSError as ex:
            raise PeerDied(f"the peer is gone: {ex.strerror or ex}") from ex
        fds = _descriptors(ancillary) if ancillary else []
        if size == 0 or got & _INCOMPLETE:
            self._close_fds(fds)
            if got & _INCOMPLETE:
                raise ProtocolViolation("a message was too long or carried too many descriptors")
            raise PeerDied("the peer has closed the channel")
        return self._view[:size], fds

    receive_now = receive_within

    def watch(self, waiter: ThreadWaiter) -> DescriptorWait:
        """Have a waiter wait for this channel from now on."""
        self.readiness = readiness = waiter.watch(self._socket.fileno(), 1)
        return readiness

    def refuse(self) -> None:
        """Take no further message: the peer's sends fail from now on.

        Messages sent before can still be received, then `receive` reports EOF.
        """
        with contextlib.suppress(OSError):  # the peer is gone already
            self._socket.shutdown(socket.SHUT_RD)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def too_large(data: bytes) -> TooLarge:
    """Return the error for a message that exceeds `MAX_MESSAGE`."""
    return TooLarge(
        f"the request's names, shapes and parameters take {len(data)} bytes, "
        f"more than the {MAX_MESSAGE} that can be passed on"
    )


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that are not needed."""
    for fd in fds:
        os.close(fd)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def listen(path: str, backlog: int = 4096) -> socket.socket:
    """Return a SEQPACKET listener at `path`, for this user only. A stale socket file is
    replaced."""
    if len(os.fsencode(path)) > 107:
        raise OSError(f"the run directory's path is too long for a Unix socket: {len(path)} bytes")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(backlog)
    sock.setblocking(False)
    return sock


def refuse(listener: socket.socket) -> None:
    """Take no further connection. Connections made before can still be accepted."""
    listener.shutdown(socket.SHUT_RD)


def accept(listener: socket.socket) -> Channel | None:
    """Return the next connection of a peer with this user's uid (or root's), None if there is
    none. Raise OSError if there is no descriptor or memory; the connection then waits on."""
    buffer = message_buffer()  # before a connection is taken, which would be lost
    try:
        sock, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError as ex:
        if ex.errno == errno.EINVAL:  # `refuse` was called, and the queue is empty
            return None
        raise
    channel = Channel(sock, buffer)
    if channel.peer_uid not in (0, os.geteuid()):
        channel.close()
        return None
    return channel
