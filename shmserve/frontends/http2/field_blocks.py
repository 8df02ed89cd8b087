"""Header blocks out of HEADERS and CONTINUATION frames."""

from __future__ import annotations

from shmserve.frontends.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITY_FLAG,
    ConnectionFailed,
    ErrorCode,
)
from shmserve.frontends.http2.limits import Limits

BESIDE_BLOCK = 1 + 5 + 255  # in the largest frame that is kept: padding's length, priority, padding


class FieldBlocks:
    """Puts one block together at a time, since nothing may come between its frames."""

    __slots__ = ("_count", "_limits", "_pieces", "_size", "ends_stream", "since", "stream_id")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pieces: list[bytes] = []
        self._size = 0
        self._count = 0
        self.stream_id = 0  # whose block is open; 0 if none is
        self.since = 0.0
        self.ends_stream = False

    def begin(self, flags: int, stream_id: int, payload: memoryview, now: float) -> bytes | None:
        """The block of a HEADERS frame, or None if CONTINUATION follows."""
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "HEADERS, stream identifier")
        if flags & (PADDED | PRIORITY_FLAG):
            payload = _unpadded(flags, payload)
        block = bytes(payload)
        self.ends_stream = bool(flags & END_STREAM)
        self._size = len(block)
        if self._size > self._limits.max_header_block_bytes:
            raise _too_large()
        if flags & END_HEADERS:
            return block
        self.stream_id, self.since = stream_id, now
        self._pieces = [block]
        self._count = 0
        return None

    def go_on(self, flags: int, payload: memoryview) -> bytes | None:
        """The whole block, if this CONTINUATION is its last."""
        if not self.stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._count += 1
        if self._count > self._limits.max_continuations:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._size += len(payload)
        if self._size > self._limits.max_header_block_bytes:
            raise _too_large()
        self._pieces.append(bytes(payload))
        if not flags & END_HEADERS:
            return None
        block = b"".join(self._pieces)
        self._pieces = []
        self.stream_id = 0
        return block


def _too_large() -> ConnectionFailed:
    return ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")


def _unpadded(flags: int, payload: memoryview) -> memoryview:
    """The field block fragment within a HEADERS frame."""
    start, stop = 0, len(payload)
    if flags & PADDED and stop:
        start = 1
        stop -= payload[0]
    if flags & PRIORITY_FLAG:
        start += 5
    if start > stop or (flags & PADDED and not payload):
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "HEADERS, padding or length")
    return payload[start:stop]
