"""Reader of frames: turns the client's bytes into frames, and HEADERS and DATA into events."""

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.control import ControlFrames
from shmserve.frontends.http2.events import (
    DataReceived,
    Event,
    RequestReceived,
    TrailersReceived,
)
from shmserve.frontends.http2.field_rules import malformed
from shmserve.frontends.http2.fields import BESIDE_BLOCK, FieldDecoder
from shmserve.frontends.http2.frames import (
    CONTINUATION,
    DATA,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    LARGEST_STREAM_ID,
    LARGEST_WINDOW,
    PADDED,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    Buffer,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
    unpack_head,
)
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.streams import Http2Stream, Http2Streams

_EMPTY = memoryview(b"")


class FrameReader:
    """Reads frames from bytes split anywhere.

    Payload of DATA is never kept: it becomes events as it arrives, or the owner receives it. Of
    any other frame the bytes are kept until the frame is complete; the largest is a header block.

    Args:
        limits: the connection's limits.
        streams: the connection's streams.
        control: obeys control frames.
        events: takes the events of frames.
        now: the time in seconds.

    Attributes:
        heard_at: when the client last sent anything.
        left: bytes to come of the current DATA payload.
        payload: stream of the latest DATA payload that did not come whole.
    """

    __slots__ = (
        "_began_at", "_control", "_ends", "_events", "_fields", "_limits", "_max_frame",
        "_max_kept", "_preface_seen", "_rest", "_rest_since", "_skipped", "_streams",
        "_strict", "heard_at", "left", "payload",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        streams: Http2Streams,
        control: ControlFrames,
        events: list[Event],
        now: float,
    ) -> None:
        self._limits = limits
        self._streams = streams
        self._control = control
        self._events = events
        self._fields = FieldDecoder(limits)
        self._max_frame = limits.max_frame_bytes
        self._max_kept = limits.max_header_block_bytes + BESIDE_BLOCK
        self._began_at = self.heard_at = now
        self._preface_seen = 0
        # only some frames may come: SETTINGS at first, CONTINUATION within a block
        self._strict = True
        self._rest = b""
        self._rest_since: float | None = None
        self.payload: Http2Stream | None = None
        self.left = 0
        self._skipped = 0  # bytes to discard after `left`: padding, unknown frames, unwanted DATA
        self._ends = False  # the stream ends with the last byte of `left`

    def receive(self, data: Buffer, now: float) -> None:
        """Read bytes into events. Raise ConnectionFailed if the connection is to end."""
        self.heard_at = now
        if self._rest:
            data = self._rest + data
            self._rest = b""
        view = memoryview(data)
        position, end = 0, len(view)
        if self._preface_seen < len(PREFACE):
            position = self._take_preface(view)
        if self.left or self._skipped:
            position = self._go_on(view, 0, end)
        if end - position >= HEAD_BYTES:
            position = self._take_frames(view, position, end, now)
        if position < end:
            self._rest = bytes(view[position:])
            if position or self._rest_since is None:
                self._rest_since = now
        else:
            self._rest_since = None

    @property
    def missing(self) -> int:
        """Bytes to the end of the current item: a frame's head, a frame with the next frame's
        head, or the payload of a frame."""
        payload_bytes = self.left + self._skipped
        if payload_bytes:
            return payload_bytes
        rest = self._rest
        if len(rest) < HEAD_BYTES:
            return HEAD_BYTES - len(rest)
        if rest[3] == DATA:
            return 1  # the length of the padding
        return HEAD_BYTES + int.from_bytes(rest[:3]) + HEAD_BYTES - len(rest)

    def _take_preface(self, view: memoryview) -> int:
        seen = self._preface_seen
        take = min(len(PREFACE) - seen, len(view))
        if view[:take] != PREFACE[seen : seen + take]:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
        self._preface_seen += take
        return take

    def _take_frames(self, view: memoryview, position: int, end: int, now: float) -> int:
        """Read all frames that are complete enough. Return the position of the next frame."""
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack_head(view, position)
            length = high << 8 | low
            stream_id &= LARGEST_STREAM_ID
            if length > self._max_frame:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "the frame is too large")
            if self._strict:
                self._check_order(kind, flags, stream_id)
            body = position + HEAD_BYTES
            if kind == DATA:
                if flags & PADDED and length and body == end:
                    break
                position = self._on_data(view, body, end, length, flags, stream_id)
            elif kind > CONTINUATION:
                self._control.spend(now)
                self._skipped = length
                position = self._go_on(view, body, end)
            else:
                if length > self._max_kept:
                    raise ConnectionFailed(
                        ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large"
                    )
                if body + length > end:
                    break
                position = body + length
                payload = view[body:position]
                try:
                    if kind in (HEADERS, CONTINUATION):
                        self._on_headers(kind, flags, stream_id, payload)
                    else:
                        if kind == WINDOW_UPDATE and length == 4:  # by far the most frequent frame
                            increment = int.from_bytes(payload, "big") & LARGEST_WINDOW
                            self._streams.open_window(stream_id, increment, now)
                        else:
                            self._control.on_frame(kind, flags, stream_id, payload, now)
                        self._strict = False
                except StreamFailed as failed:
                    self._control.fail_stream(stream_id, failed, now)
        return position

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._fields.stream_id:
            if kind != CONTINUATION or stream_id != self._fields.stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        elif kind != SETTINGS or flags & frames.ACK:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS must come first")

    # --- HEADERS and CONTINUATION

    def _on_headers(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """Read a part of a header block: of a request, of trailers, or of an ended stream."""
        fields, streams = self._fields, self._streams
        if kind == HEADERS:
            block = fields.begin(flags, stream_id, payload, self.heard_at)
        else:
            block = fields.go_on(flags, payload)
        self._strict = block is None
        if block is None:
            return
        ends = fields.ends_stream
        stream = streams.open.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, block, ends)
            return
        if stream_id <= streams.last_id:
            fields.skip(block)
            self._control.forgive(stream_id, self.heard_at)
            return
        full = len(streams.open) >= self._limits.max_streams
        if full or (streams.last_served is not None and stream_id > streams.last_served):
            fields.skip(block)
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "no more streams")
        head = fields.request(block)
        if ends and head.content_length > 0:
            raise malformed("content-length without content")
        streams.begin(stream_id, head, ends, self.heard_at)
        self._events.append(RequestReceived(stream_id, head, ends))

    def _on_trailers(self, stream: Http2Stream, block: bytes, ends: bool) -> None:
        fields = self._fields.trailers(block)
        if stream.remote_closed:
            raise StreamFailed(ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        if not ends:
            raise malformed("trailers without the end of the stream")
        if stream.content_left > 0:
            raise malformed("less content than its content-length")
        stream.end_remote()
        self._events.append(TrailersReceived(stream.id, fields))

    # --- DATA

    def _on_data(
        self, view: memoryview, body: int, end: int, length: int, flags: int, stream_id: int
    ) -> int:
        """Take a DATA frame's payload as far as it is there. Return the position after it."""
        size = length
        if flags & PADDED:
            if not length or view[body] >= length:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
            size -= 1 + view[body]
            body += 1
        ends = bool(flags & END_STREAM)
        if not size and not ends:
            self._control.spend(self.heard_at)
        try:
            stream = self._streams.take_data(stream_id, length, size, ends)
            if stream is None:
                self._forgive(stream_id, length)
        except StreamFailed as failed:
            self._control.fail_stream(stream_id, failed, self.heard_at)
            stream = None
        if stream is None:
            self._skipped = length - (1 if flags & PADDED else 0)
            return self._go_on(view, body, end)
        stop = body + size
        if stop <= end and size == length:
            if size or ends:
                self._events.append(DataReceived(stream_id, view[body:stop], ends))
            return stop
        self.payload, self.left, self._ends = stream, size, ends
        if length > size:
            self._skipped = length - size - 1
            self._streams.consumed(stream_id, length - size)
        if not size and ends:
            self._events.append(DataReceived(stream_id, _EMPTY, True))
        return self._go_on(view, body, end)

    def _forgive(self, stream_id: int, length: int) -> None:
        """Discard DATA of a stream that was closed before the client knew."""
        if self._streams.is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "DATA, idle stream")
        self._control.forgive(stream_id, self.heard_at, length)
        self._streams.give_back(length)

    def _go_on(self, view: memoryview, position: int, end: int) -> int:
        """Take available bytes of the current payload, and of the bytes to discard behind it.
        Return the position after the taken bytes."""
        take = min(self.left, end - position)
        if take:
            stop = position + take
            stream = self.payload
            self.left -= take
            if stream is not None and not stream.closed:
                ends = self._ends and not self.left
                self._events.append(DataReceived(stream.id, view[position:stop], ends))
            position = stop
        if not self.left and self._skipped:
            take = min(self._skipped, end - position)
            self._skipped -= take
            position += take
        return position

    def payload_received(self, count: int, now: float) -> list[Event]:
        """Note that the owner has received `count` bytes of `payload_due`. Return the event of the
        stream's end, if this is the end. Raise ValueError if fewer bytes were due."""
        if count > self.left:
            raise ValueError(f"{self.left} bytes of payload are due, not {count}")
        self.heard_at = now
        self.left -= count
        stream = self.payload
        if self.left or not self._ends or stream is None or stream.closed:
            return []
        return [DataReceived(stream.id, _EMPTY, True)]

    def payload_returned(self, count: int) -> None:
        """Make payload due again: the last `count` bytes for `receive`, which were not taken."""
        self.left += count

    # --- time

    def due(self) -> float:
        """Return the time at which the client counts as too slow."""
        limits = self._limits
        if not self._control.settings_acked:
            return self._began_at + limits.settings_timeout_s
        if self.left or self._skipped:
            return self.heard_at + limits.frame_stall_s
        since = self._fields.since if self._fields.stream_id else self._rest_since
        return float("inf") if since is None else since + limits.header_timeout_s

    def tick(self, now: float) -> None:
        """Raise ConnectionFailed if the client has been too slow."""
        if now >= self.due():
            if not self._control.settings_acked:
                raise ConnectionFailed(ErrorCode.SETTINGS_TIMEOUT, "no acknowledged SETTINGS")
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "a frame takes too long")
