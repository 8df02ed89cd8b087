"""Request bodies: the application's ``wsgi.input``.

In addition to WSGI's methods, a body has `readinto` and `copied`. `readinto` receives from the
socket straight into the caller's memory. `copied` counts the bytes for which this was not
possible: bytes that came with the head, and every byte of a chunked body.
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

# recv() allocates the size it is asked for. So a reader that asks for a whole body at once must
# not make recv() allocate more than one piece.
_PIECE = 1 << 20

# Largest part of a body, in bytes, with a deadline of its own. The next deadline begins when this
# part has come. So a client that stops is waited for no longer than a client that never began,
# whatever length was announced.
PART = 8 << 20

# Only written, never read: unwanted bytes of all threads land here at once.
SCRAP = bytearray(256 * 1024)


class Source(Protocol):
    """The connection, as a body uses it."""

    sock: socket.socket
    settings: Settings
    watch: tuple[str, float] | None
    expired: bool

    def wait(self, phase: str, seconds: float) -> None: ...


class RequestBody:
    """A body of known length, possibly 0.

    Args:
        source: the connection.
        length: bytes still to be received, without `piece`.
        piece: the body's first bytes, if received along with the head.
        expects: whether the client waits for ``100 Continue``.

    Attributes:
        copied: bytes that `readinto` copied in user space.
        failed: the client stopped early or broke the framing; the connection is lost.
        finished: nothing of this body is left on the connection.
    """

    __slots__ = (
        "_expects", "_left", "_offset", "_part_left", "_piece", "_source", "_until", "copied",
        "failed", "finished",
    )  # fmt: skip

    def __init__(
        self, source: Source, length: int = 0, piece: bytes = b"", expects: bool = False
    ) -> None:
        self._source = source
        self._left = length
        self._piece = piece
        self._offset = 0
        self._expects = expects
        self._until = inf
        self._part_left = 0  # bytes to come until the deadline
        self.copied = 0
        self.failed = False
        self.finished = length == 0

    def _receive(self, want: int) -> bytes:
        """Receive the next bytes, b"" at the end. `want` is a hint."""
        piece = bytearray(min(want, self._left, _PIECE))
        count = self.readinto(memoryview(piece))
        return bytes(piece) if count == len(piece) else bytes(piece[:count])

    def _extend(self) -> None:
        """Set the deadline of the next part, by its size and the least rate. Before the first
        part, ask the client to continue; raise OSError if the client cannot be asked."""
        source, settings = self._source, self._source.settings
        self._part_left = size = min(self._left, PART)
        latest = monotonic() + settings.body_timeout_s
        self._until = min(self._until, latest) + size / settings.min_bytes_per_s
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
        # `data` is always the tail of bytes returned by _next().
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
        """Fill the whole view. Return the number of bytes; fewer mean the end of the body or the
        client."""
        view = memoryview(view).cast("B")
        offset = self._offset
        filled = min(len(view), len(self._piece) - offset)
        if filled:  # bytes that came with the head
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
                if self._part_left <= 0:
                    self._extend()
                source.watch = (BODY, self._until)
                part = view[filled : min(end, filled + self._part_left)]
                if not (count := receive(part, 0, _WHOLE)):
                    break
                filled += count
                self._left -= count
                self._part_left -= count
        except OSError:
            pass
        source.watch = None
        self.finished = self._left == 0
        if filled < end:
            self._fail()
        return filled

    def skippable(self, limit: int) -> bool:
        """Return True if `drain` can be expected to succeed, as far as the connection can tell
        beforehand."""
        return self.finished or not (self.failed or self._expects or self._left > limit)

    def drain(self, limit: int) -> bool:
        """Discard the rest of the body, up to about `limit` bytes. Return False if the connection
        must close."""
        if self._expects:  # a client that was not asked to continue may or may not send the body
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
