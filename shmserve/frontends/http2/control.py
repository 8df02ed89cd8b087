"""Control frames of the client: every frame type except DATA, HEADERS and CONTINUATION."""

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.events import Event, StreamReset
from shmserve.frontends.http2.fields import RequestFields
from shmserve.frontends.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from shmserve.frontends.http2.grpc_metadata import parse_timeout
from shmserve.frontends.http2.keepalive import Keepalive, Shutdown
from shmserve.frontends.http2.limits import FloodBudget, Limits
from shmserve.frontends.http2.sender import Sender
from shmserve.frontends.http2.streams import Http2Streams, OutgoingBytes

_NAMES = {
    frames.PRIORITY: "PRIORITY", frames.RST_STREAM: "RST_STREAM", frames.SETTINGS: "SETTINGS",
    frames.PING: "PING", frames.GOAWAY: "GOAWAY", frames.WINDOW_UPDATE: "WINDOW_UPDATE",
}  # fmt: skip
_LENGTHS = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_OF_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_OF_STREAM = frozenset((frames.PRIORITY, frames.RST_STREAM))


class Waits(FloodBudget):
    """Budget for resets of unanswered streams, in seconds that the streams were open.

    A client with `max_streams` streams waits at most `max_streams` seconds per second. So clients
    that give up calls at their deadlines are never cut off, however many calls they give up. A
    flood of the same shape looks equal and is only bounded in rate: with the default limits 5,120
    abandoned calls a second, because a wait costs at least `least_wait_s`.

    The wait of a stream is its age. If server or client is late, a call and the reset at its
    deadline are read together, and the stream seems new: then the `grpc-timeout` counts as the
    wait. A new stream without a timeout has no wait, and the budget of resets pays.
    """

    __slots__ = ("_least_s",)

    # seconds; a longer wait costs no more, so resets of all streams fit into the burst
    _LONGEST_S = 1.0
    _BURST_S = 2.0  # seconds per stream: the largest wait that can be charged at once

    def __init__(self, limits: Limits, now: float) -> None:
        super().__init__(int(self._BURST_S * limits.max_streams), limits.max_streams, now)
        self._least_s = limits.least_wait_s

    def pay(self, now: float, age_s: float, head: RequestFields) -> bool:
        """Charge the wait of a reset stream. Return False if the stream has no wait or the budget
        is too small."""
        wait_s = age_s
        if age_s < self._least_s:
            timeout = head.value("grpc-timeout")
            try:
                wait_s = parse_timeout(timeout) if timeout is not None else 0.0
            except ValueError:
                wait_s = 0.0
            if not wait_s:
                return False
        return self.spend(now, min(max(wait_s, self._least_s), self._LONGEST_S))


class ControlFrames:
    """Checks and obeys control frames; `ControlBudget` says what pays for each.

    Args:
        limits: the connection's limits.
        streams: the connection's streams.
        sender: obeys the client's windows and settings.
        output: takes answers to frames.
        events: takes the events of frames.
        now: the time in seconds.

    Attributes:
        keepalive: the rules for pings.
        shutdown: the drain of the connection.
        settings_acked: whether the client has acknowledged the server's SETTINGS.
    """

    __slots__ = (
        "_control", "_events", "_limits", "_output", "_resets", "_sender", "_streams",
        "_waits", "keepalive", "settings_acked", "shutdown",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        streams: Http2Streams,
        sender: Sender,
        output: OutgoingBytes,
        events: list[Event],
        now: float,
    ) -> None:
        self._limits = limits
        self._streams = streams
        self._sender = sender
        self._output = output
        self._events = events
        self._control = streams.control
        self._resets = streams.resets
        self._waits = Waits(limits, now)
        self.keepalive = Keepalive(limits, output)
        self.shutdown = Shutdown(limits, streams, output)
        self.settings_acked = False

    def spend(self, now: float) -> None:
        """Charge a frame that costs little. Raise ConnectionFailed if there were too many."""
        if not self._control.spend(now):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")

    def forgive(self, stream_id: int, now: float, length: int = 0) -> None:
        """Accept a frame of a closed stream, if the stream ended before the client had ended its
        request.

        Args:
            stream_id: the closed stream.
            now: the time in seconds.
            length: bytes of DATA, charged to the rest of the closed stream's window; 0 for other
                frames.

        Raises:
            ConnectionFailed: the stream is not one of these, or the frame exceeds window or
                budget.
        """
        window = self._streams.forgiven.get(stream_id)
        if window is None:
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, "a frame of a closed stream")
        if not length:
            self.spend(now)
        elif length > window:
            raise ConnectionFailed(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the closed stream's window"
            )
        else:
            self._streams.forgiven[stream_id] = window - length

    def fail_stream(self, stream_id: int, failed: StreamFailed, now: float) -> None:
        """Reset a stream for a fault of the client, or refuse a request that opened no stream."""
        stream = self._streams.open.get(stream_id)
        if stream is None:
            self._streams.refuse(stream_id, failed.code)
        else:
            self._streams.reset(stream, failed.code)
            self._events.append(StreamReset(stream_id, failed.code, False, failed.reason))
        self._spend_reset(now)

    def _spend_reset(self, now: float) -> None:
        if not self._resets.spend(now):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")

    def on_frame(
        self, kind: int, flags: int, stream_id: int, payload: memoryview, now: float
    ) -> None:
        """Obey a whole frame. Raise StreamFailed if the stream is to be reset. Raise
        ConnectionFailed if the connection is to end."""
        _check_form(kind, stream_id, len(payload))
        if kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, int.from_bytes(payload, "big"), now)
        elif kind == frames.PING:
            self._on_ping(flags, bytes(payload), now)
        else:
            self.spend(now)
        if kind == frames.SETTINGS:
            self._on_settings(flags, payload)

    def _on_rst_stream(self, stream_id: int, code: int, now: float) -> None:
        if self._streams.is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "RST_STREAM, idle stream")
        stream = self._streams.open.get(stream_id)
        if stream is None:
            self.spend(now)
            return
        self._streams.cancel(stream)
        self._events.append(StreamReset(stream_id, code, True))
        if stream.answered:
            self._resets.left += 1
        elif not self._waits.pay(now, now - stream.opened_at, stream.head):
            self._spend_reset(now)

    def _on_ping(self, flags: int, data: bytes, now: float) -> None:
        if flags & frames.ACK:
            self.spend(now)
            self.keepalive.on_ack(data)
            self.shutdown.on_ack(data)
            return
        self._output.add(frames.ping(data, frames.ACK))
        if not self.keepalive.on_ping(now, len(self._streams.open)):
            self.spend(now)

    def _on_settings(self, flags: int, payload: memoryview) -> None:
        if flags & frames.ACK:
            if payload:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS, length")
            self.settings_acked = True
            return
        if len(payload) % 6:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS, length")
        if len(payload) > 6 * self._limits.max_settings:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        values = {}
        for identifier, value in frames.read_settings(payload):
            _check_setting(identifier, value)
            if identifier == frames.HEADER_TABLE_SIZE:
                self._sender.shrink_table(value)  # the smallest of several values counts
            values[identifier] = value
        if frames.MAX_FRAME_SIZE in values:
            self._sender.change_max_frame(values[frames.MAX_FRAME_SIZE])
        window = values.get(frames.INITIAL_WINDOW_SIZE)
        if window is not None:
            self._streams.change_initial_window(window)
        self._output.add(frames.SETTINGS_ACK)


def _check_form(kind: int, stream_id: int, length: int) -> None:
    """Check a frame's length, and whether it names a stream if and only if it must."""
    if kind == frames.PUSH_PROMISE:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
    if length != _LENGTHS.get(kind, length) or (kind == frames.GOAWAY and length < 8):
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"{_NAMES[kind]}, length")
    if kind in (_OF_CONNECTION if stream_id else _OF_STREAM):
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"{_NAMES[kind]}, stream identifier")


def _check_setting(identifier: int, value: int) -> None:
    if identifier == frames.INITIAL_WINDOW_SIZE and value > frames.LARGEST_WINDOW:
        raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE")
    if identifier == frames.ENABLE_PUSH and value > 1:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH")
    if identifier == frames.MAX_FRAME_SIZE and not (
        frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES
    ):
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE")
