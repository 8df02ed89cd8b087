"""DATA frames: payload told as it comes, or received by its owner."""

from __future__ import annotations

from shmserve.frontends.http2.control import ControlFrames
from shmserve.frontends.http2.events import DataReceived, Event
from shmserve.frontends.http2.field_rules import malformed
from shmserve.frontends.http2.flow import ReceiveWindow
from shmserve.frontends.http2.frames import (
    END_STREAM,
    PADDED,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
)
from shmserve.frontends.http2.streams import Http2Stream, Http2Streams

_EMPTY = memoryview(b"")


class DataFrames:
    """The payload that is being received, then padding or what nobody wants.

    Args:
        streams: the connection's.
        window: flow control of the whole connection.
        control: told of streams that fail.
        events: what came of it.
    """

    __slots__ = (
        "_control", "_ends", "_events", "_payload", "_streams", "_window", "left", "skipped",
    )  # fmt: skip

    def __init__(
        self,
        streams: Http2Streams,
        window: ReceiveWindow,
        control: ControlFrames,
        events: list[Event],
    ) -> None:
        self._streams = streams
        self._window = window
        self._control = control
        self._events = events
        self._payload: Http2Stream | None = None
        self.left = 0  # bytes of payload to come
        self.skipped = 0  # bytes to leave out after them
        self._ends = False  # with them ends the stream

    def begin(
        self, view: memoryview, body: int, end: int, length: int, flags: int, stream_id: int
    ) -> int:
        """A frame's payload, as much as is there; where it ends."""
        size = length
        if flags & PADDED:
            if not length or view[body] >= length:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
            size -= 1 + view[body]
            body += 1
        stream = self._accept(stream_id, length, size, flags)
        if stream is None:
            return self.skip(view, body, end, length - (1 if flags & PADDED else 0))
        stop = body + size
        ends = bool(flags & END_STREAM)
        if stop <= end and size == length:
            stream.remote_closed = ends
            if size or ends:
                self._events.append(DataReceived(stream_id, view[body:stop], ends))
            return stop
        self._payload, self.left, self._ends = stream, size, ends
        if length > size:
            self.skipped = length - size - 1
            self._streams.consumed(stream, length - size)
        if not size and ends:
            self.payload_received(0)
        return self.go_on(view, body, end)

    def _accept(self, stream_id: int, length: int, size: int, flags: int) -> Http2Stream | None:
        """The stream that a DATA frame is for, charged for it; None if nobody wants it."""
        window = self._window
        window.left -= length
        if window.left < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window")
        stream = self._streams.open.get(stream_id)
        if not size and not flags & END_STREAM:
            self._control.spend()
        if stream is None:
            if self._streams.is_idle(stream_id):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "DATA, idle stream")
            self._control.forgive(stream_id)
            window.give_back(length)
            return None
        try:
            _charge(stream, length, size, flags)
        except StreamFailed as failed:
            window.give_back(length)
            self._control.fail_stream(stream_id, failed)
            return None
        return stream

    def go_on(self, view: memoryview, position: int, end: int) -> int:
        """What there is of the payload that was begun, and of what comes behind it."""
        take = min(self.left, end - position)
        if take:
            stop = position + take
            stream = self._payload
            if stream is not None and not stream.closed:
                self._events.append(DataReceived(stream.id, view[position:stop], self._take(take)))
            else:
                self.left -= take
            position = stop
        if not self.left and self.skipped:
            take = min(self.skipped, end - position)
            self.skipped -= take
            position += take
        return position

    def _take(self, count: int) -> bool:
        """True if the stream ends with that many bytes more."""
        self.left -= count
        if self.left or not self._ends or self._payload is None:
            return False
        self._payload.remote_closed = True
        return True

    def skip(self, view: memoryview, position: int, end: int, count: int) -> int:
        """Leave out that many bytes, of which some may not have come."""
        self.skipped = count
        return self.go_on(view, position, end)

    @property
    def payload_due(self) -> tuple[int, int] | None:
        """The stream, and how many of the next bytes are its payload."""
        if self.left and self._payload is not None and not self._payload.closed:
            return self._payload.id, self.left
        return None

    def payload_received(self, count: int) -> None:
        """That many bytes of `payload_due` are where they belong."""
        if count > self.left:
            raise ValueError(f"{self.left} bytes of payload are due, not {count}")
        stream = self._payload
        if self._take(count) and stream is not None and not stream.closed:
            self._events.append(DataReceived(stream.id, _EMPTY, True))


def _charge(stream: Http2Stream, length: int, size: int, flags: int) -> None:
    """DATA against the stream's window and what was announced."""
    if stream.remote_closed:
        raise StreamFailed(ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
    stream.receive_window -= length
    if stream.receive_window < 0:
        raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window")
    stream.held += length
    if stream.content_left >= 0:
        stream.content_left -= size
        if stream.content_left < 0 or (flags & END_STREAM and stream.content_left):
            stream.held -= length
            raise malformed("content and content-length differ")
