"""Client socket of HTTP: calls give way to the loop where they would block.

A call for a head waits before it reads, since the head is rarely there already. Calls for bodies
and answers try first. No call moves so many bytes at once that other connections have to wait.
"""

import socket
from collections.abc import Iterable
from time import monotonic
from typing import Any, Protocol

from shmserve import waiting
from shmserve.frontends.descriptors import READ, WRITE
from shmserve.frontends.hub import Hub

_NOW = int(socket.MSG_DONTWAIT)
_WHOLE = int(socket.MSG_WAITALL)
_AT_ONCE = 1 << 20

# Methods of the base class: a look-up through an instance would search two classes.
_recv = socket.socket.recv
_recv_into = socket.socket.recv_into
_sendmsg = socket.socket.sendmsg


class WatchedClient(Protocol):
    """A client with a deadline, as its socket uses it."""

    watch: tuple[str, float] | None

    def cut_if_overdue(self, now: float) -> None: ...


class GreenletSocket(socket.socket):
    """An accepted socket, taken over for one greenlet at a time. `hub`: the worker's loop.
    `accepted`: the socket, which is detached. `deadlines`: the connection; its `watch` holds the
    deadline of each wait."""

    __slots__ = ("_deadlines", "_readiness", "_since_pause")

    def __init__(self, hub: Hub, accepted: socket.socket, deadlines: WatchedClient) -> None:
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        super().__init__(family, kind, protocol, accepted.detach())
        self._readiness = hub.watch(self.fileno())
        self._since_pause = 0  # bytes received since the last pause
        self._deadlines = deadlines

    def await_ready(self, events: int) -> None:
        """Wait until the socket may be ready: for bytes or room, or because the deadline has shut
        it down."""
        watch = self._deadlines.watch
        assert watch is not None  # every wait for a client has a deadline
        if not self._readiness.wait(watch[1], events):
            self._deadlines.cut_if_overdue(monotonic())

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags & _NOW:
            return _recv(self, size, flags)
        if flags & _WHOLE:
            whole = bytearray(size)
            del whole[self.recv_into(whole, size, flags) :]
            return bytes(whole)
        while True:
            self.await_ready(READ)
            try:
                return _recv(self, size, flags | _NOW)
            except BlockingIOError:
                continue

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        if flags & _NOW:
            return _recv_into(self, buffer, size, flags)
        view = memoryview(buffer)[: size or None]
        got = 0
        while True:
            try:
                count = _recv_into(self, view[got : got + _AT_ONCE], 0, _NOW)
            except BlockingIOError:
                self.await_ready(READ)
                continue
            got += count
            if not count or not flags & _WHOLE or got == len(view):
                break
            self.await_ready(READ)
        self._since_pause += got
        if self._since_pause >= _AT_ONCE:
            self._since_pause = 0
            waiting.pause()
        return got

    def sendmsg(self, buffers: Iterable[Any], *options: Any) -> int:
        while True:
            try:
                return _sendmsg(self, buffers, (), _NOW)
            except BlockingIOError:
                self.await_ready(WRITE)

    def sendall(self, data: Any, flags: int = 0) -> None:
        left = memoryview(data)
        while left:
            left = left[self.sendmsg((left,)) :]

    def close(self) -> None:
        self._readiness.forget()
        super().close()
