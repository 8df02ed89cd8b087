"""Server side of one HTTP/2 connection: bytes in, events out; commands in, bytes out."""

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.control import ControlFrames
from shmserve.frontends.http2.events import ConnectionTerminated, Event, StreamReset
from shmserve.frontends.http2.frames import Buffer, ConnectionFailed, ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.reader import FrameReader
from shmserve.frontends.http2.sender import ALONE_FRAME, Sender
from shmserve.frontends.http2.streams import IOV_MAX, Http2Streams, OutgoingBytes

_TICK_S = 1.0  # seconds between checks for slow readers
_NEVER = float("inf")


class Connection:
    """Protocol of one connection; socket and clock belong to the owner.

    Methods are not safe to be called from two threads at once. Times are in seconds of any
    monotonic clock. Methods never raise for faults of the client, which become events.

    Args:
        limits: limits for the client.
        now: the time.

    Attributes:
        reader: reader of frames; payload can be due only while `reader.left` is not 0.
        payload_received, payload_returned: the owner's reports on `payload_due`, see
            `FrameReader`.
        consumed: lets the client send more, see `Http2Streams.consumed`.
        released: returns the tokens that became free, see `OutgoingBytes.take_released`.
        send: sends a response or a part of one, see `Sender.send`.
        failed: True if the connection has ended other than by a drain.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._events: list[Event] = []
        self._output = output = OutgoingBytes()
        output.add(frames.settings(_settings(limits)))
        streams = self._streams = Http2Streams(limits, output, now)
        self._sender = Sender(limits, streams, output)
        control = ControlFrames(limits, streams, self._sender, output, self._events, now)
        self._keepalive, self._shutdown = control.keepalive, control.shutdown
        self.reader = FrameReader(limits, streams, control, self._events, now)
        self.payload_received = self.reader.payload_received
        self.payload_returned = self.reader.payload_returned
        self.consumed = streams.consumed
        self.released = output.take_released
        self.send = self._sender.send
        self._max_pending = limits.high_water_bytes + ALONE_FRAME + limits.max_control_bytes
        self._sent_at = now  # when the socket last took `min_progress_bytes` of waiting bytes
        self._sent_bytes = 0
        self._waits = False  # bytes were offered to the socket and are not all sent
        self.failed = False

    # --- input

    def receive(self, data: Buffer, now: float) -> list[Event]:
        """Read bytes from the socket. `data` may begin and end anywhere in a frame. Events hold
        views of `data`: do not overwrite `data` while events are in use."""
        if self.failed:
            return []
        try:
            self.reader.receive(data, now)
            if self._output.pending > self._max_pending:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")
        except ConnectionFailed as failed:
            self._fail(failed)
        events = self._events[:]
        self._events.clear()
        return events

    @property
    def has_news(self) -> bool:
        """Return True if there are bytes to send or tokens to release, or if the connection drains
        or has failed."""
        output = self._output
        return bool(
            output.pending
            or output.released
            or self._streams.sending
            or self.failed
            or self._shutdown.began_at is not None
        )

    @property
    def payload_due(self) -> tuple[int, int] | None:
        """Id of the stream whose payload comes next, and the number of bytes; None if other bytes
        come next. The owner may receive all or some of these bytes straight into place and report
        with `payload_received`, or pass all bytes to `receive`."""
        stream, remaining = self.reader.payload, self.reader.left
        if not remaining or stream is None or stream.closed or self.failed:
            return None
        return stream.id, remaining

    # --- output

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream at once. Parts of the response that are not framed yet are dropped."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._streams.reset(stream, code)

    def outgoing(self, now: float) -> list[Buffer]:
        """Return buffers for one sendmsg, empty if there is nothing to send; valid until `sent`."""
        output = self._output
        if self._streams.sending:
            self._sender.pump(now)
        if not self._waits and output.pending:
            self._waits = True
            self._sent_at, self._sent_bytes = now, 0
        parts = output.parts
        return parts if len(parts) <= IOV_MAX else parts[:IOV_MAX]

    def sent(self, count: int, now: float) -> bool:
        """Note that the socket has taken `count` bytes of `outgoing`. Return True if there may be
        more to send."""
        self._sent_bytes += count
        if self._sent_bytes >= self._limits.min_progress_bytes:
            self._sent_at, self._sent_bytes = now, 0
        self._output.sent(count)
        if self._output.pending:
            return True
        self._waits = False
        return bool(self._streams.sending)

    # --- end of the connection

    def drain(self, now: float, reason: str) -> None:
        """Send GOAWAY for new calls, and finish the open calls. `now`: the time. `reason`: ASCII
        text for the client, sent as the GOAWAYs' debug data."""
        if not self.failed:
            self._shutdown.begin(now, reason)

    def terminate(self, code: ErrorCode, reason: str) -> None:
        """Send GOAWAY and forget all streams. `reason` is ASCII and reaches the client."""
        if not self.failed:
            self._fail(ConnectionFailed(code, reason))
            self._events.clear()

    def lost(self) -> None:
        """Release every token: the socket is gone and nothing can be sent."""
        self.failed = True
        self._streams.forget_all()
        self._output.discard()

    @property
    def finished(self) -> bool:
        """True once all is sent and the connection has failed or drained: close the socket."""
        streams = self._streams
        served = streams.last_served is not None and not streams.open
        return not self._output.pending and (self.failed or served)

    def tick(self, now: float) -> list[Event]:
        """Check all time limits; call at `next_tick`."""
        if self.failed:
            return []
        try:
            self.reader.tick(now)
            if self._waits and now >= self._sent_at + self._limits.send_stall_s:
                raise ConnectionFailed(ErrorCode.NO_ERROR, "nothing is read")
            self._keepalive.tick(now, len(self._streams.open), self.reader.heard_at)
            self._shutdown.tick(now)
        except ConnectionFailed as failed:
            self._fail(failed)
        for stream in list(self._streams.sending.values()):
            if now >= stream.progress_at + self._limits.send_stall_s:
                self._streams.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
                reason = "the response is not read"
                self._events.append(
                    StreamReset(stream.id, ErrorCode.ENHANCE_YOUR_CALM, False, reason)
                )
        events = self._events[:]
        self._events.clear()
        return events

    def next_tick(self, now: float) -> float:
        """Return the time of the next `tick`; infinite if no time limit is running."""
        if self.failed:
            return _NEVER
        deadline = min(
            self.reader.due(),
            self._keepalive.due(len(self._streams.open), self.reader.heard_at),
            self._shutdown.due(),
        )
        if self._waits:
            deadline = min(deadline, self._sent_at + self._limits.send_stall_s)
        return min(deadline, now + _TICK_S) if self._streams.sending else deadline

    def _fail(self, failed: ConnectionFailed) -> None:
        self.failed = True
        self._streams.forget_all()
        self._output.add(frames.goaway(self._streams.last_id, failed.code, failed.reason))
        self._events.append(ConnectionTerminated(failed.code, failed.reason))


def _settings(limits: Limits) -> dict[int, int]:
    return {
        frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
        frames.INITIAL_WINDOW_SIZE: limits.stream_window,
        frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
        frames.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
