"""The client's bytes into frames, and its HEADERS and DATA into events."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.control import ControlFrames
from shmserve.frontends.http2.data import DataFrames
from shmserve.frontends.http2.events import RequestReceived, TrailersReceived
from shmserve.frontends.http2.field_blocks import BESIDE_BLOCK, FieldBlocks
from shmserve.frontends.http2.field_rules import malformed
from shmserve.frontends.http2.fields import FieldDecoder
from shmserve.frontends.http2.frames import (
    CONTINUATION,
    DATA,
    HEAD_BYTES,
    HEADERS,
    LARGEST_STREAM_ID,
    PADDED,
    PREFACE,
    SETTINGS,
    Buffer,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
    unpack_head,
)
from shmserve.frontends.http2.parts import ConnectionParts
from shmserve.frontends.http2.streams import Http2Stream


class FrameReader:
    """Takes bytes however they are split.

    Payload of DATA is never kept: it is told as it comes, or received by its owner. Of other
    frames what has come is kept until the rest has; the largest is a header block.

    Args:
        parts: the connection's.
        data: takes payload.
        control: obeys the frames that are not of a request.
        now: the time in seconds.
    """

    def __init__(
        self, parts: ConnectionParts, data: DataFrames, control: ControlFrames, now: float
    ) -> None:
        limits = parts.limits
        self._limits = limits
        self._streams = parts.streams
        self._sender = parts.sender
        self._data = data
        self._control = control
        self._shutdown = parts.shutdown
        self._fields = FieldDecoder(limits)
        self._blocks = FieldBlocks(limits)
        self._max_frame = limits.max_frame_bytes
        self._max_kept = limits.max_header_block_bytes + BESIDE_BLOCK
        self._now = now
        self._began_at = now
        self._preface_seen = 0
        self._strict = True  # not every frame may come: SETTINGS first, CONTINUATION within a block
        self._rest = b""
        self._rest_since: float | None = None
        self._events = parts.events

    def receive(self, data: Buffer, now: float) -> None:
        """Read what came, into events.

        Raises:
            ConnectionFailed: the connection is to end.
        """
        self._now = self._control.now = now
        if self._rest:
            data = self._rest + data
            self._rest = b""
        view = memoryview(data)
        position, end = 0, len(view)
        if self._preface_seen < len(PREFACE):
            position = self._take_preface(view)
        if self._data.left or self._data.skipped:
            position = self._data.go_on(view, 0, end)
        position = self._take_frames(view, position, end)
        if position < end:
            self._rest = bytes(view[position:])
            if position or self._rest_since is None:
                self._rest_since = now
        else:
            self._rest_since = None

    @property
    def missing(self) -> int:
        """How many bytes end what has begun: a frame's head, a frame and the next one's head, the
        payload of one."""
        unwanted = self._data.left + self._data.skipped
        if unwanted:
            return unwanted
        rest = self._rest
        if len(rest) < HEAD_BYTES:
            return HEAD_BYTES - len(rest)
        if rest[3] == DATA:
            return 1  # how much padding there is
        return HEAD_BYTES + int.from_bytes(rest[:3]) + HEAD_BYTES - len(rest)

    def _take_preface(self, view: memoryview) -> int:
        seen = self._preface_seen
        take = min(len(PREFACE) - seen, len(view))
        if view[:take] != PREFACE[seen : seen + take]:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
        self._preface_seen += take
        return take

    def _take_frames(self, view: memoryview, position: int, end: int) -> int:
        """Where the first frame begins that has not come as far as is needed."""
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
                position = self._data.begin(view, body, end, length, flags, stream_id)
            elif kind > CONTINUATION:
                self._control.spend()
                position = self._data.skip(view, body, end, length)
            else:
                if length > self._max_kept:
                    raise ConnectionFailed(
                        ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large"
                    )
                position = body + length
                if position > end:
                    return body - HEAD_BYTES
                try:
                    self._on_frame(kind, flags, stream_id, view[body:position])
                except StreamFailed as failed:
                    self._control.fail_stream(stream_id, failed)
        return position

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._blocks.stream_id:
            if kind != CONTINUATION or stream_id != self._blocks.stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        elif kind != SETTINGS or flags & frames.ACK:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS must come first")

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if kind == HEADERS:
            block = self._blocks.begin(flags, stream_id, payload, self._now)
        elif kind == CONTINUATION:
            block = self._blocks.go_on(flags, payload)
        else:
            self._control.on_frame(kind, flags, stream_id, payload)
            self._strict = False
            return
        self._strict = block is None
        if block is not None:
            self._on_field_block(stream_id, block, self._blocks.ends_stream)

    def _on_field_block(self, stream_id: int, block: bytes, ends: bool) -> None:
        """A request, trailers, or what comes too late to matter."""
        streams = self._streams
        stream = streams.open.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, block, ends)
            return
        if stream_id <= streams.last_id:
            self._fields.skip(block)
            self._control.forgive(stream_id)
            return
        streams.last_id = stream_id
        if len(streams.open) >= self._limits.max_streams or not self._shutdown.serves(stream_id):
            self._fields.skip(block)
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "no more streams")
        head = self._fields.request(block)
        if ends and head.content_length > 0:
            raise malformed("content-length without content")
        streams.open[stream_id] = Http2Stream(
            stream_id,
            self._sender.initial_window,
            self._limits.stream_window,
            head.content_length,
            ends,
        )
        self._events.append(RequestReceived(stream_id, head, ends))

    def _on_trailers(self, stream: Http2Stream, block: bytes, ends: bool) -> None:
        fields = self._fields.trailers(block)
        if stream.remote_closed:
            raise StreamFailed(ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        if not ends:
            raise malformed("trailers without the end of the stream")
        if stream.content_left > 0:
            raise malformed("less content than its content-length")
        stream.remote_closed = True
        self._events.append(TrailersReceived(stream.id, fields))

    def due(self, heard_at: float) -> float:
        """When the client will have been too slow."""
        limits = self._limits
        if not self._control.settings_acked:
            return self._began_at + limits.settings_timeout_s
        if self._data.left or self._data.skipped:
            return heard_at + limits.frame_stall_s
        since = self._blocks.since if self._blocks.stream_id else self._rest_since
        return float("inf") if since is None else since + limits.header_timeout_s

    def tick(self, now: float, heard_at: float) -> None:
        """Raises ConnectionFailed if it has been too slow."""
        if now >= self.due(heard_at):
            if not self._control.settings_acked:
                raise ConnectionFailed(ErrorCode.SETTINGS_TIMEOUT, "no acknowledged SETTINGS")
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "a frame takes too long")
