"""One HTTP/2 connection as a server sees it: bytes in, events out; commands in, bytes out."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.control import ControlFrames
from shmserve.frontends.http2.events import ConnectionTerminated, Event, StreamReset
from shmserve.frontends.http2.frames import Buffer, ConnectionFailed, ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.reader import FrameReader
from shmserve.frontends.http2.sender import ALONE_FRAME, Sender
from shmserve.frontends.http2.streams import IOV_MAX, Http2Streams, OutgoingBytes

_TICK_S = 1.0  # how often slow readers are looked at
_NEVER = float("inf")


class Connection:
    """The protocol of one connection; sockets and clocks are its owner's.

    Nothing here is safe to be called by two threads at once. Times are in seconds of any
    monotonic clock. Methods never raise for what the client does: that ends in events.

    Args:
        limits: what the client may ask for.
        now: the time.

    Attributes:
        reader: its `left` tells at once whether anything can be due.
        payload_received, payload_returned: tell what became of `payload_due`, see `FrameReader`.
        consumed: lets the client send more, see `Http2Streams.consumed`.
        released: tells which tokens are free, see `OutgoingBytes.take_released`.
        send: sends a response or a part of one, see `Sender.send`.
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
        self._most_pending = limits.high_water_bytes + ALONE_FRAME + limits.max_control_bytes
        self._sent_at = now  # since then, less than `min_progress_bytes` of what waits was sent
        self._sent_bytes = 0
        self._waits = False  # something was offered to the socket, and is not sent entirely
        self._failed = False

    # --- what comes in

    def receive(self, data: Buffer, now: float) -> list[Event]:
        """Read what the socket gave; `data` may begin and end anywhere.

        Events hold views of `data`: it must not be overwritten while they are in use.
        """
        if self._failed:
            return []
        try:
            self.reader.receive(data, now)
            if self._output.pending > self._most_pending:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")
        except ConnectionFailed as failed:
            self._fail(failed)
        events = self._events[:]
        self._events.clear()
        return events

    @property
    def has_news(self) -> bool:
        """Whether there is something to send or to release, or all has been said."""
        output = self._output
        return bool(
            output.pending
            or output.released
            or self._streams.sending
            or self._failed
            or self._shutdown.began_at is not None
        )

    @property
    def payload_due(self) -> tuple[int, int] | None:
        """A stream and a number of bytes: as many of the next ones are its payload.

        Its owner may receive them, or a part, right where they belong, and say so by
        `payload_received`; or ignore it, and give everything to `receive`.
        """
        stream, left = self.reader.payload, self.reader.left
        if not left or stream is None or stream.closed or self._failed:
            return None
        return stream.id, left

    @property
    def missing(self) -> int:
        """Bytes until it can be said whether payload is due; at least one."""
        return self.reader.missing

    # --- what goes out

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream at once; what is not framed yet of its response is dropped."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._streams.reset(stream, code)

    def ping(self, data: bytes) -> None:
        """Eight bytes for the client to send back: `PingAcknowledged`."""
        if len(data) != 8:
            raise ValueError("a ping carries eight bytes")
        if not self._failed:
            self._output.add(frames.ping(data))

    def outgoing(self, now: float) -> list[Buffer]:
        """Buffers for one sendmsg, empty if there is nothing to send; valid until `sent`."""
        output = self._output
        if self._streams.sending:
            self._sender.pump(now)
        if not self._waits and output.pending:
            self._waits = True
            self._sent_at, self._sent_bytes = now, 0
        parts = output.parts
        return parts if len(parts) <= IOV_MAX else parts[:IOV_MAX]

    def sent(self, count: int, now: float) -> bool:
        """The socket has taken that many bytes of `outgoing`; whether there may be more to send."""
        self._sent_bytes += count
        if self._sent_bytes >= self._limits.min_progress_bytes:
            self._sent_at, self._sent_bytes = now, 0
        self._output.sent(count)
        if self._output.pending:
            return True
        self._waits = False
        return bool(self._streams.sending)

    # --- life and death

    def drain(self, now: float, reason: str) -> None:
        """Ask the client to go elsewhere with new calls, and finish those that are open.

        Args:
            reason: ASCII text for the client, sent as the GOAWAYs' debug data.
        """
        if not self._failed:
            self._shutdown.begin(now, reason)

    def terminate(self, code: ErrorCode, reason: str) -> None:
        """Say GOAWAY and forget all streams; `reason` is ASCII and reaches the client."""
        if not self._failed:
            self._fail(ConnectionFailed(code, reason))
            self._events.clear()

    def lost(self) -> None:
        """The socket is gone: nothing can be sent, every token is released."""
        self._failed = True
        self._streams.forget_all()
        self._output.discard()

    @property
    def failed(self) -> bool:
        """Whether the connection has ended, other than by a drain."""
        return self._failed

    @property
    def finished(self) -> bool:
        """All has been said: close the socket."""
        streams = self._streams
        served = streams.last_served is not None and not streams.open
        return not self._output.pending and (self._failed or served)

    @property
    def open_streams(self) -> int:
        return len(self._streams.open)

    def tick(self, now: float) -> list[Event]:
        """See whether time has run out for anything; to be called at `next_tick`."""
        if self._failed:
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
        """When to call `tick`; infinite if there is nothing to wait for."""
        if self._failed:
            return _NEVER
        due = min(
            self.reader.due(),
            self._keepalive.due(len(self._streams.open), self.reader.heard_at),
            self._shutdown.due(),
        )
        if self._waits:
            due = min(due, self._sent_at + self._limits.send_stall_s)
        return min(due, now + _TICK_S) if self._streams.sending else due

    def _fail(self, failed: ConnectionFailed) -> None:
        self._failed = True
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
