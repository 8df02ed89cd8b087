"""The streams of a connection: which are open, and which were until just now."""

from __future__ import annotations

from collections import deque

import msgspec

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.flow import ReceiveWindow
from shmserve.frontends.http2.frames import Buffer, ErrorCode
from shmserve.frontends.http2.limits import FloodBudget, Limits
from shmserve.frontends.http2.output import OutgoingBytes

# Frames that a client may well owe us for a call that went as it should: its window updates.
_CONTROL_PER_STREAM = 4


class Outgoing(msgspec.Struct, eq=False):
    """One `send` that waits, or what is left of it."""

    head: bytes | None
    buffers: list[Buffer]
    left: int  # bytes of `buffers` that are not framed yet
    trailers: bytes | None
    token: object
    index: int = 0  # where in `buffers` the rest begins
    offset: int = 0


class Http2Stream(msgspec.Struct, eq=False):
    """An open stream; what is half-closed by us is gone, since every response ends with trailers.

    Args:
        id: the client's number for it.
        send_window: bytes of DATA the client takes; may be negative.
        receive_window: bytes of DATA the client may send.
        content_left: bytes of DATA that were announced and have not come; -1 if none were.
        remote_closed: the client has ended its side.
        closed: it is gone, whoever still has the object.
        head_sent: response headers were sent, or wait.
        ended: trailers wait to be sent.
        held: bytes of DATA that have come and are not consumed.
        returned: bytes that were consumed and not yet given back to the client.
        queue: what waits to be framed; None until something has.
        parked: something waits for `send_window` alone.
        moved: bytes framed since `progress_at`.
    """

    id: int
    send_window: int
    receive_window: int
    content_left: int
    remote_closed: bool
    closed: bool = False
    head_sent: bool = False
    ended: bool = False
    held: int = 0
    returned: int = 0
    queue: deque[Outgoing] | None = None
    parked: bool = False
    moved: int = 0
    progress_at: float = 0.0


class Http2Streams:
    """All streams of one connection, and the ways they end.

    Args:
        limits: the connection's.
        output: where RST_STREAM goes, and tokens of what will not be sent.
        window: the connection's own, that gets back what a stream held.
        control: the budget of control frames, part of which calls earn.
        resets: the budget of streams that come to nothing.
    """

    __slots__ = (
        "_control", "_forgiven", "_half_window", "_limits", "_output", "_resets", "_window",
        "blocked", "last_id", "open", "ready", "sending",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        output: OutgoingBytes,
        window: ReceiveWindow,
        control: FloodBudget,
        resets: FloodBudget,
    ) -> None:
        self._limits = limits
        self._output = output
        self._window = window
        self._control = control
        self._resets = resets
        self._half_window = limits.stream_window // 2
        self._forgiven: dict[int, None] = {}
        self.open: dict[int, Http2Stream] = {}
        self.last_id = 0
        # Those with a queue; of these, whose turn it is, and who waits for the connection's window
        self.sending: dict[int, Http2Stream] = {}
        self.ready: deque[Http2Stream] = deque()
        self.blocked: deque[Http2Stream] = deque()

    def is_idle(self, stream_id: int) -> bool:
        """Neither open nor closed: it has never been."""
        return stream_id > self.last_id or not stream_id & 1

    def is_forgiven(self, stream_id: int) -> bool:
        """We reset it not long ago, so the client may not have known when it sent."""
        return stream_id in self._forgiven

    def consumed(self, stream: Http2Stream, count: int) -> None:
        """Bytes of DATA are not in anybody's way any more: the client may send as many."""
        if count > stream.held:
            raise ValueError(f"stream {stream.id} holds {stream.held} bytes, not {count}")
        stream.held -= count
        self._window.give_back(count)
        if stream.remote_closed:
            return
        stream.returned += count
        if stream.returned >= self._half_window:
            self._output.add(frames.window_update(stream.id, stream.returned))
            stream.receive_window += stream.returned
            stream.returned = 0

    def refuse(self, stream_id: int, code: int) -> None:
        """RST_STREAM; what still comes for the stream is ignored."""
        self._output.add(frames.rst_stream(stream_id, code))
        if len(self._forgiven) >= self._limits.reset_streams_remembered:
            del self._forgiven[next(iter(self._forgiven))]
        self._forgiven[stream_id] = None

    def reset(self, stream: Http2Stream, code: int) -> None:
        self.refuse(stream.id, code)
        self.forget(stream)

    def complete(self, stream: Http2Stream) -> None:
        """The response has been framed to its end."""
        self._control.left += _CONTROL_PER_STREAM
        self._resets.left += 1
        if not stream.remote_closed:
            self.refuse(stream.id, ErrorCode.NO_ERROR)  # nobody reads the rest of the request
        self.forget(stream)

    def forget(self, stream: Http2Stream) -> None:
        """The stream is over: windows and memory that it held are given back."""
        stream.closed = True
        self.open.pop(stream.id, None)
        if stream.held:
            self._window.give_back(stream.held)
            stream.held = 0
        if stream.queue:
            del self.sending[stream.id]
            for place in (self.ready, self.blocked):
                if stream in place:
                    place.remove(stream)
            for outgoing in stream.queue:
                if outgoing.token is not None:
                    self._output.mark(outgoing.token)  # a part of it may be framed already
            stream.queue.clear()

    def forget_all(self) -> None:
        for stream in list(self.open.values()):
            self.forget(stream)
