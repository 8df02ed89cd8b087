"""Request bodies: what the application finds as ``wsgi.input``.

Beyond what WSGI asks for, a body has `readinto`, which receives from the socket
straight into the caller's memory, and `copied`, the bytes for which that was not
possible: those that had come with the head, and every byte of a chunked body.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from math import inf
from time import monotonic
from typing import Protocol

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge

BODY = "body"
_WHOLE = int(socket.MSG_WAITALL)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# recv() allocates what it is asked for, so a reader that asks for everything at
# once must not make us allocate more than one piece ahead of what has arrived.
_PIECE = 1 << 20

# A deadline counts for so many bytes at most, whatever was announced. The next ones get theirs when
# these have come; a client that stops is then waited for no longer than one that never began.
PART = 8 << 20

# Only ever written: bytes nobody wants land here, from all threads at once.
SCRAP = bytearray(256 * 1024)


class Source(Protocol):
    """What a body needs of its connection."""

    sock: socket.socket
    settings: Settings
    watch: tuple[str, float] | None
    expired: bool

    def wait(self, phase: str, seconds: float) -> None: ...


class RequestBody:
    """A body of known length, which may be none.

    Args:
        source: the connection.
        length: bytes still to be received, not counting `piece`.
        piece: the body's first bytes, if they were received along with the head.
        expects: the client waits for ``100 Continue``.

    Attributes:
        copied: bytes that `readinto` copied in user space.
        failed: the client stopped early or broke the framing; the connection is lost.
        finished: nothing of this body is left on the connection.
    """

    __slots__ = (
        "_due",
        "_expects",
        "_left",
        "_offset",
        "_piece",
        "_source",
        "_until",
        "copied",
        "failed",
        "finished",
    )

    def __init__(
        self, source: Source, length: int = 0, piece: bytes = b"", expects: bool = False
    ) -> None:
        self._source = source
        self._left = length
        self._piece = piece
        self._offset = 0
        self._expects = expects
        self._until = inf
        self._due = 0  # bytes that are to come until then
        self.copied = 0
        self.failed = False
        self.finished = length == 0

    def _receive(self, want: int) -> bytes:
        """Receive the next bytes, b"" at the end; `want` is a hint."""
        piece = bytearray(min(want, self._left, _PIECE))
        count = self.readinto(memoryview(piece))
        return bytes(piece) if count == len(piece) else bytes(piece[:count])

    def _extend(self) -> None:
        """Give the next part the time that its size takes at the least rate. Before the first look
        at the socket, ask the client to go on; raises OSError if it cannot be asked."""
        source, settings = self._source, self._source.settings
        self._due = due = min(self._left, PART)
        latest = monotonic() + settings.body_timeout_s
        self._until = min(self._until, latest) + due / settings.min_bytes_per_s
        if self._expects:
            self._expects = False
            # With a deadline: a client that reads nothing cannot hold the greenlet
            source.wait(BODY, settings.body_timeout_s)
            source.sock.sendall(CONTINUE)

    def _fail(self) -> None:
        self.failed = True
        self._source.expired = True

    def _next(self, want: int) -> bytes:
        piece, offset = self._piece, self._offset
        if offset < len(piece):
            rest = piece[offset:] if offset else piece
            self._piece, self._offset = b"", 0
            return rest
        return self._receive(want)

    def _put_back(self, data: bytes) -> None:
        # Only called with the tail of what _next() returned.
        self._piece, self._offset = data, 0

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = sys.maxsize
        offset, piece = self._offset, self._piece
        if len(piece) - offset >= size:
            self._offset = offset + size
            return piece[offset : offset + size]
        pieces: list[bytes] = []
        while size > 0 and (data := self._next(size) if self._piece else self._receive(size)):
            if len(data) > size:
                self._put_back(data[size:])
                data = data[:size]
            pieces.append(data)
            size -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readline(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = sys.maxsize
        pieces: list[bytes] = []
        while size > 0:
            data = self._next(min(size, 8192))
            if not data:
                break
            end = data.find(b"\n", 0, size) + 1 or min(len(data), size)
            pieces.append(data[:end])
            size -= end
            if end < len(data):
                self._put_back(data[end:])
            if pieces[-1].endswith(b"\n"):
                break
        return b"".join(pieces)

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        lines, total = [], 0
        for line in self:
            lines.append(line)
            total += len(line)
            if hint is not None and 0 < hint <= total:
                break
        return lines

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def readinto(self, view: memoryview) -> int:
        """Fill the whole view; fewer bytes mean that the body or the client ended."""
        view = memoryview(view).cast("B")
        offset = self._offset
        filled = min(len(view), len(self._piece) - offset)
        if filled:  # it came with the head
            view[:filled] = memoryview(self._piece)[offset : offset + filled]
            self._offset = offset + filled
            self.copied += filled
        end = min(len(view), filled + self._left)
        if filled == end:
            return filled
        source = self._source
        receive = source.sock.recv_into
        try:
            while filled < end and not self.failed:
                if self._due <= 0:
                    self._extend()
                source.watch = (BODY, self._until)
                part = view[filled : min(end, filled + self._due)]
                if not (count := receive(part, 0, _WHOLE)):
                    break
                filled += count
                self._left -= count
                self._due -= count
        except OSError:
            pass
        source.watch = None
        self.finished = self._left == 0
        if filled < end:
            self._fail()
        return filled

    def skippable(self, limit: int) -> bool:
        """Whether `drain` can be expected to succeed, as far as one can tell beforehand."""
        return self.finished or not (self.failed or self._expects or self._left > limit)

    def drain(self, limit: int) -> bool:
        """Discard what the application left unread; False if the connection must close."""
        if self._expects:  # the client may or may not send it: nobody can know
            return self.finished
        try:
            while limit > 0 and not self.finished and not self.failed:
                limit -= self._discard()
        except InvalidArgument:
            return False
        return self.finished

    def _discard(self) -> int:
        size = min(self._left, len(SCRAP))
        return self.readinto(memoryview(SCRAP)[:size]) or sys.maxsize


def too_large(settings: Settings) -> TooLarge:
    return TooLarge(
        f"the request body is larger than {settings.max_request_bytes} bytes"
        " (setting max_request_bytes)"
    )
