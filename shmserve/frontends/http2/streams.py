"""Streams of a connection, their windows, and the bytes waiting to be sent."""

from collections import deque

import msgspec

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.fields import RequestFields
from shmserve.frontends.http2.frames import Buffer, ConnectionFailed, ErrorCode, StreamFailed
from shmserve.frontends.http2.limits import ControlBudget, FloodBudget, Limits

IOV_MAX = 1024  # buffers that Linux takes in one sendmsg


class Outgoing(msgspec.Struct, eq=False):
    """The rest of one `send` that waits."""

    head: bytes | None
    buffers: list[Buffer]
    left: int  # bytes of `buffers` not framed yet
    trailers: bytes | None
    token: object
    index: int = 0  # index in `buffers` of the next byte's buffer; `offset` is its position there
    offset: int = 0

    def take_head(self) -> bytes | None:
        """Return the header block the first time, then None."""
        head, self.head = self.head, None
        return head

    def take(self, size: int) -> list[Buffer]:
        """Return the next `size` bytes as slices of the buffers."""
        self.left -= size
        parts: list[Buffer] = []
        while size:
            buffer, start = self.buffers[self.index], self.offset
            length = min(len(buffer) - start, size)
            if start or start + length < len(buffer):
                parts.append(memoryview(buffer)[start : start + length])
            elif length:
                parts.append(buffer)
            self.offset += length
            if self.offset == len(buffer):
                self.index += 1
                self.offset = 0
            size -= length
        return parts


class Http2Stream(msgspec.Struct, eq=False):
    """An open stream. A stream ends with its response, so no stream stays half-closed by the
    server.

    Args:
        id: the stream's number, chosen by the client.
        send_window: bytes of DATA the client takes; may be negative.
        receive_window: bytes of DATA the client may send.
        content_left: bytes of DATA announced and still to come; -1 if not announced.
        remote_closed: whether the client has ended its side.
        closed: whether the stream has ended; the object may still be referenced.
        opened_at: when the request came, in seconds of the connection's clock.
        head: the request's fields.
        head_sent: whether response headers were sent or queued.
        answered: whether DATA of the response was framed.
        ended: whether trailers are queued.
        held: bytes of DATA received and not consumed.
        returned: bytes consumed and not yet given back to the client's window.
        queue: parts of the response to frame; None until a part is queued.
        moved: bytes framed since `progress_at`.
        progress_at: when the queue last made progress, in seconds.
    """

    id: int
    send_window: int
    receive_window: int
    content_left: int
    remote_closed: bool
    opened_at: float
    head: RequestFields
    closed: bool = False
    head_sent: bool = False
    answered: bool = False
    ended: bool = False
    held: int = 0
    returned: int = 0
    queue: deque[Outgoing] | None = None
    moved: int = 0
    progress_at: float = 0.0

    def enqueue(self, outgoing: Outgoing, now: float) -> None:
        """Queue a part of the response."""
        self.head_sent = True
        self.ended = outgoing.trailers is not None
        if self.queue:
            self.queue.append(outgoing)
        else:
            self.queue = deque((outgoing,))
            self.progress_at, self.moved = now, 0

    def framed(self, size: int) -> None:
        """Note that `size` bytes of the response were framed."""
        self.head_sent = True
        self.send_window -= size
        self.answered = self.answered or bool(size)

    def progressed(self, size: int, least: int, now: float) -> None:
        """Note that `size` bytes left the queue. Only `least` bytes in sum count as progress, so a
        client that opens its window byte by byte makes none."""
        self.moved += size
        if self.moved >= least:
            self.progress_at, self.moved = now, 0

    def close(self) -> int:
        """End the stream, even if still referenced. Return the number of bytes that it held."""
        self.closed = True
        held, self.held = self.held, 0
        return held

    def end_remote(self) -> None:
        """Note that the client has ended its side."""
        self.remote_closed = True


class OutgoingBytes:
    """Framed bytes that are not sent yet. A token stands for the memory behind some buffers.
    `released` gets a token exactly once: when the last of its buffers is sent or will never be
    sent."""

    __slots__ = ("_answered", "_marks", "_position", "parts", "pending", "released")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self.pending = 0  # bytes in `parts`
        self._answered = False  # HEADERS or DATA were added since `take_answered`
        self.released: list[object] = []
        self._position = 0  # bytes sent in all
        # An empty deque takes 700 bytes more than a list, and most connections are idle
        self._marks: list[tuple[int, object]] = []

    def add(self, part: Buffer) -> None:
        self.parts.append(part)
        self.pending += len(part)

    def answer(self, parts: list[Buffer], nbytes: int, token: object) -> None:
        """Add frames of a response. `token`: see `mark`; None for no token."""
        self.parts += parts
        self.pending += nbytes
        self._answered = True
        if token is not None:
            self.mark(token)

    def take_answered(self) -> bool:
        """Return True if a response's frame was added since the last call."""
        answered, self._answered = self._answered, False
        return answered

    def take_released(self) -> list[object]:
        """Return the tokens whose memory is free, each token once."""
        tokens = self.released
        if tokens:
            self.released = []
        return tokens

    def mark(self, token: object) -> None:
        """Release `token` once all bytes added so far are sent."""
        if not self.pending:
            self.released.append(token)
            return
        self._marks.append((self._position + self.pending, token))

    def sent(self, count: int) -> None:
        """Note that the first `count` bytes are sent."""
        self.pending -= count
        self._position += count
        if not self.pending:
            self.parts.clear()
        else:
            self._trim(count)
        marks = self._marks
        while marks and marks[0][0] <= self._position:
            self.released.append(marks.pop(0)[1])

    def _trim(self, count: int) -> None:
        parts = self.parts
        index = 0
        while count >= len(parts[index]):
            count -= len(parts[index])
            index += 1
        if count:
            parts[index] = memoryview(parts[index])[count:]
        del parts[:index]

    def discard(self) -> None:
        """Drop all bytes and release their tokens: nothing will be sent any more."""
        self.parts.clear()
        self.pending = 0
        self.released.extend(token for _, token in self._marks)
        self._marks.clear()


class Http2Streams:
    """All streams of one connection: opening, receive and send windows, and end.

    The connection's window is given back in halves, as DATA is consumed. When a stream ends, the
    bytes it holds are given back.

    Args:
        limits: the connection's limits.
        output: takes frames, and tokens of responses that will not be sent.
        now: the time in seconds.

    Attributes:
        control: the budget of control frames, partly earned by streams.
        resets: the budget of streams that end early.
        window: bytes of DATA that the client may send on all streams together.
        send_window: bytes of DATA that the client takes on all streams together.
        initial_window: bytes of DATA that the client takes on a new stream.
        last_served: the last stream to be served, once the second GOAWAY has named it; None
            before.
        updates: WINDOW_UPDATE frames that the client may owe, see `ControlBudget`.
        sending: streams with a queue.
        ready, blocked: streams of `sending` that wait for their turn, or for the connection's
            window.
        parked: numbers of the streams that wait for their own window alone.
        forgiven: for each recently ended stream, bytes of DATA that the client may still send:
            clients learn of the end late, and some send queued messages even after their own
            reset.
    """

    __slots__ = (
        "_half", "_half_window", "_limits", "_output", "_returned", "blocked", "control",
        "forgiven", "initial_window", "last_id", "last_served", "open", "parked", "ready",
        "resets", "send_window", "sending", "updates", "window",
    )  # fmt: skip

    def __init__(self, limits: Limits, output: OutgoingBytes, now: float) -> None:
        self._limits = limits
        self._output = output
        self.control = ControlBudget(limits.control_burst, limits.control_per_s, now)
        self.updates = 0
        self.resets = FloodBudget(limits.reset_burst, limits.reset_per_s, now)
        self.send_window = frames.DEFAULT_WINDOW
        self.window = limits.connection_window
        self._half = limits.connection_window // 2
        self._returned = 0
        if self.window > frames.DEFAULT_WINDOW:
            output.add(frames.window_update(0, self.window - frames.DEFAULT_WINDOW))
        self._half_window = limits.stream_window // 2
        self.forgiven: dict[int, int] = {}
        self.open: dict[int, Http2Stream] = {}
        self.last_id = 0
        self.last_served: int | None = None
        self.initial_window = frames.DEFAULT_WINDOW
        self.sending: dict[int, Http2Stream] = {}
        # lists, as `OutgoingBytes._marks`
        self.ready: list[Http2Stream] = []
        self.blocked: list[Http2Stream] = []
        self.parked: set[int] = set()

    def is_idle(self, stream_id: int) -> bool:
        """Return True if the stream was never opened."""
        return stream_id > self.last_id or not stream_id & 1

    def begin(self, stream_id: int, head: RequestFields, ends: bool, now: float) -> None:
        """Open a stream for a request. `ends`: the request has no content."""
        self.last_id = stream_id
        window = self._limits.stream_window
        self.open[stream_id] = Http2Stream(
            stream_id, self.initial_window, window, head.content_length, ends, now, head
        )
        self.control.left += ControlBudget.STREAM_FRAMES

    def open_window(self, stream_id: int, increment: int, now: float) -> None:
        """Obey a WINDOW_UPDATE, which the client's budget pays for. Raise ConnectionFailed if the
        connection is to end. Raise StreamFailed if the stream is to be reset."""
        if self.updates > 0:
            self.updates -= 1
        elif not self.control.spend(now):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")
        if not stream_id:
            if not increment:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a window opened by nothing")
            self.send_window += increment
            if self.send_window > frames.LARGEST_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            return
        stream = self.open.get(stream_id)
        if stream is None:
            if self.is_idle(stream_id):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE, idle stream")
        elif not increment:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "a window opened by nothing")
        else:
            self.open_send_window(stream, increment)

    def open_send_window(self, stream: Http2Stream, increment: int) -> None:
        """Change a stream's send window, after WINDOW_UPDATE or SETTINGS. `increment` may be
        negative. Raise StreamFailed if the window becomes too large."""
        stream.send_window += increment
        if stream.send_window > frames.LARGEST_WINDOW:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        if stream.id in self.parked and stream.send_window > 0:
            self.parked.remove(stream.id)
            self.ready.append(stream)

    def framed(self, size: int) -> None:
        """Charge `size` bytes of DATA sent by the server to the client's window."""
        self.send_window -= size
        self.updates += ControlBudget.UPDATES_PER_DATA + (size >> 10)

    def change_initial_window(self, size: int) -> None:
        """Obey the client's SETTINGS_INITIAL_WINDOW_SIZE, for open streams, too. Raise
        ConnectionFailed if a stream's window becomes too large."""
        delta, self.initial_window = size - self.initial_window, size
        if not delta:
            return
        try:
            for stream in self.open.values():
                self.open_send_window(stream, delta)
        except StreamFailed as failed:
            raise ConnectionFailed(failed.code, failed.reason) from None

    def consumed(self, stream_id: int, count: int) -> None:
        """Let the client send `count` more bytes of DATA: as many have left the stream's memory.

        Bytes held by a stream when it ends count as consumed.

        Raise ValueError if the stream holds fewer bytes.
        """
        stream = self.open.get(stream_id)
        if stream is None:
            return
        if count > stream.held:
            raise ValueError(f"stream {stream_id} holds {stream.held} bytes, not {count}")
        stream.held -= count
        self._returned += count
        if self._returned >= self._half:
            self.give_back(0)
        if stream.remote_closed:
            return
        stream.returned += count
        if stream.returned >= self._half_window:
            self._output.add(frames.window_update(stream_id, stream.returned))
            stream.receive_window += stream.returned
            stream.returned = 0

    def take_data(self, stream_id: int, length: int, size: int, ends: bool) -> Http2Stream | None:
        """Charge a DATA frame to the windows and to the announced content length.

        Args:
            stream_id: the frame's stream.
            length: bytes of the frame, padding included.
            size: bytes of content.
            ends: whether the stream ends with the frame.

        Returns:
            The stream; None if it is not open.

        Raises:
            ConnectionFailed: the connection's window is smaller than the frame.
            StreamFailed: the stream does not allow the frame.
        """
        self.window -= length
        if self.window < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window")
        stream = self.open.get(stream_id)
        if stream is None:
            return None
        if not stream.remote_closed:
            stream.receive_window -= length
        if stream.remote_closed:
            code, reason = ErrorCode.STREAM_CLOSED, "DATA after the end of the stream"
        elif stream.receive_window < 0:
            code, reason = ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window"
        elif 0 <= stream.content_left < size or (ends and stream.content_left > size):
            code, reason = ErrorCode.PROTOCOL_ERROR, "content and content-length differ"
        else:
            stream.held += length
            if stream.content_left >= 0:
                stream.content_left -= size
            if size:
                self.updates += ControlBudget.UPDATES_PER_DATA
            # no frame may follow, though the payload of this frame may still be on its way
            if ends:
                stream.remote_closed = True
            return stream
        self.give_back(length)
        raise StreamFailed(code, reason)

    def give_back(self, count: int) -> None:
        """Open the connection's window by `count` bytes that no stream holds."""
        self._returned += count
        if self._returned >= self._half:
            self._output.add(frames.window_update(0, self._returned))
            self.window += self._returned
            self._returned = 0

    def refuse(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM for a request that opens no stream; its DATA is ignored."""
        self.last_id = max(self.last_id, stream_id)
        self._end(stream_id, code, self._limits.stream_window)

    def _end(self, stream_id: int, code: int, window: int) -> None:
        """Send RST_STREAM and ignore up to `window` bytes of DATA that are on their way."""
        self._output.add(frames.rst_stream(stream_id, code))
        self._forgive(stream_id, window)

    def _forgive(self, stream_id: int, window: int) -> None:
        if len(self.forgiven) >= self._limits.reset_streams_remembered:
            del self.forgiven[next(iter(self.forgiven))]
        self.forgiven[stream_id] = window

    def reset(self, stream: Http2Stream, code: int) -> None:
        """End a stream with RST_STREAM."""
        self._end(stream.id, code, stream.receive_window)
        self.forget(stream)

    def cancel(self, stream: Http2Stream) -> None:
        """Forget a stream that the client has reset. grpc-java (netty) sends queued messages even
        after the RST_STREAM of their call."""
        if not stream.remote_closed:
            self._forgive(stream.id, stream.receive_window)
        self.forget(stream)

    def complete(self, stream: Http2Stream, size: int = 0) -> None:
        """Close a stream whose response is framed to its end. `size`: bytes of DATA in the last
        frames."""
        if size:
            self.send_window -= size
            self.updates += ControlBudget.UPDATES_PER_DATA + (size >> 10)
        self.resets.left += 1
        if not stream.remote_closed:
            # The server does not read the rest of the request
            self._end(stream.id, ErrorCode.NO_ERROR, stream.receive_window)
        self.forget(stream)

    def forget(self, stream: Http2Stream) -> None:
        """Remove a stream, and give back its windows and memory."""
        self.open.pop(stream.id, None)
        if held := stream.close():
            self.give_back(held)
        if stream.queue:
            del self.sending[stream.id]
            self.parked.discard(stream.id)
            for place in (self.ready, self.blocked):
                if stream in place:
                    place.remove(stream)
            for outgoing in stream.queue:
                if outgoing.token is not None:
                    self._output.mark(outgoing.token)  # a part of its memory may be framed already
            stream.queue.clear()

    def name_last(self) -> int:
        """Refuse streams after the latest one from now on. Return its number."""
        self.last_served = self.last_id
        return self.last_id

    def forget_all(self) -> None:
        for stream in list(self.open.values()):
            self.forget(stream)
