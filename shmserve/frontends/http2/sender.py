"""Sender of responses: frames as much as the client's windows allow, for each stream in turn."""

from collections.abc import Sequence

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Buffer,
    frame_head,
    long_field_block,
    pack_head,
)
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.streams import Http2Stream, Http2Streams, Outgoing, OutgoingBytes

# Largest DATA frames. A stream that sends alone has room for a message of 1 MiB with its head;
# streams that share the connection have less.
ALONE_FRAME = (1 << 20) + (16 << 10)
_SHARED_FRAME = 64 << 10
_EMPTY_TABLE = b"\x20"  # HPACK: sets the size of the dynamic table to zero
_DEFAULT_TABLE = 4096


class SendQueueFull(Exception):
    """A stream's client does not keep up: wait for tokens before the next `send`."""


class Sender:
    """Frames the responses of streams.

    A response that fits into windows and limits is framed at once. Otherwise the stream has a
    queue and is in one of three places: in turn (`ready`), held until the connection's window
    opens (`blocked`), or `parked` until the stream's window opens.

    `limits`: the connection's limits. `streams`: the connection's streams, closed as their
    responses complete. `output`: takes frames.
    """

    __slots__ = ("_limits", "_max_frame", "_output", "_streams", "_table_update")

    def __init__(self, limits: Limits, streams: Http2Streams, output: OutgoingBytes) -> None:
        self._limits = limits
        self._streams = streams
        self._output = output
        self._table_update = b""
        self._max_frame = frames.DEFAULT_FRAME_BYTES

    def send(
        self,
        stream_id: int,
        now: float,
        *,
        head: bytes | None = None,
        data: Sequence[Buffer] = (),
        trailers: bytes | None = None,
        token: object = None,
    ) -> bool:
        """Frame a response or a part of one if nothing is in its way, else queue it.

        Headers come first, then data, then trailers, which end the response. A response of
        trailers alone is allowed (gRPC's Trailers-Only). If the client has not ended its request
        when the trailers are framed, RST_STREAM with NO_ERROR refuses the rest.

        Args:
            stream_id: the stream.
            now: the time in seconds.
            head: an encoded block, see `encode_fields`.
            data: buffers of single bytes, unchanged until `token` is released.
            trailers: an encoded block.
            token: stands for the memory of `data`; `released` returns each token exactly once.
                None: no token.

        Returns:
            True if the response was framed or queued; False if the stream is gone and nothing is
            sent.

        Raises:
            SendQueueFull: `max_queued_sends` of the stream are waiting; `token` stays with the
                caller.
            ValueError: headers, data and trailers are out of order.
        """
        output, streams = self._output, self._streams
        stream = streams.open.get(stream_id)
        if stream is None:
            if token is not None:
                output.released.append(token)
            return False
        size = 0
        for buffer in data:
            size += len(buffer)
        if stream.ended or (head is None and size and not stream.head_sent):
            raise ValueError("a response is its headers, then data, then trailers")
        if (
            stream.queue
            or streams.ready
            or streams.blocked
            or size > ALONE_FRAME
            or size > self._max_frame
            or size > stream.send_window
            or size > streams.send_window
            or output.pending >= self._limits.high_water_bytes
        ):
            self._enqueue(stream, Outgoing(head, list(data), size, trailers, token), now)
            return True
        lead = b"" if head is None else self._field_block(stream.id, head, 0)
        if size:
            lead += pack_head(size >> 8, size & 0xFF, DATA, 0, stream.id)
        parts: list[Buffer] = [lead, *data] if lead else []
        nbytes = len(lead) + size
        if trailers is not None:
            last = self._field_block(stream.id, trailers, END_STREAM)
            parts.append(last)
            nbytes += len(last)
        output.answer(parts, nbytes, token)
        if trailers is not None:
            streams.complete(stream, size)
            return True
        stream.framed(size)
        if size:
            streams.framed(size)
        return True

    def _enqueue(self, stream: Http2Stream, outgoing: Outgoing, now: float) -> None:
        queued = len(stream.queue or ())
        if queued >= self._limits.max_queued_sends:
            raise SendQueueFull(f"{queued} messages wait for their client")
        stream.enqueue(outgoing, now)
        if not queued:
            self._streams.sending[stream.id] = stream
            self._streams.ready.append(stream)

    def pump(self, now: float) -> None:
        """Frame data as the windows allow, a frame of each stream in turn, up to the high water."""
        output, high_water = self._output, self._limits.high_water_bytes
        ready, blocked = self._streams.ready, self._streams.blocked
        while output.pending < high_water:
            if blocked and self._streams.send_window > 0:
                self._advance(blocked.pop(0), now)
            elif ready:
                self._advance(ready.pop(0), now)
            else:
                return

    def _advance(self, stream: Http2Stream, now: float) -> None:
        """Frame one DATA frame of a stream, with its header blocks, and put the stream in its next
        place."""
        queue = stream.queue
        assert queue, "a stream in turn has something to send"
        outgoing, output, streams = queue[0], self._output, self._streams
        head = outgoing.take_head()
        parts: list[Buffer] = []
        if head is not None:
            parts.append(self._field_block(stream.id, head, 0))
        if outgoing.left:
            alone = len(streams.sending) == 1
            largest = ALONE_FRAME if alone else _SHARED_FRAME
            window = min(stream.send_window, streams.send_window)
            size = min(outgoing.left, window, self._max_frame, largest)
            if size > 0:
                parts += (frame_head(size, DATA, 0, stream.id), *outgoing.take(size))
                stream.framed(size)
                stream.progressed(size, self._limits.min_progress_bytes, now)
                streams.framed(size)
        ends = not outgoing.left
        output.answer(parts, sum(map(len, parts)), outgoing.token if ends else None)
        if ends:
            queue.popleft()
            if not queue:
                del streams.sending[stream.id]
            if outgoing.trailers is not None:
                output.add(self._field_block(stream.id, outgoing.trailers, END_STREAM))
                streams.complete(stream)
                return
        if queue:
            self._place(stream, queue[0])

    def _place(self, stream: Http2Stream, waiting: Outgoing) -> None:
        if not waiting.left or waiting.head is not None:
            self._streams.ready.append(stream)
        elif stream.send_window <= 0:
            self._streams.parked.add(stream.id)
        elif self._streams.send_window <= 0:
            self._streams.blocked.append(stream)
        else:
            self._streams.ready.append(stream)

    def _field_block(self, stream_id: int, block: bytes, flags: int) -> bytes:
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        size = len(block)
        if size > self._max_frame:
            return long_field_block(stream_id, block, flags, self._max_frame)
        return pack_head(size >> 8, size & 0xFF, HEADERS, flags | END_HEADERS, stream_id) + block

    def change_max_frame(self, size: int) -> None:
        """Obey the client's SETTINGS_MAX_FRAME_SIZE."""
        self._max_frame = size

    def shrink_table(self, size: int) -> None:
        """Obey a smaller HPACK table than the default: announce an empty table; none is used."""
        if size < _DEFAULT_TABLE:
            self._table_update = _EMPTY_TABLE
