"""Every frame from the client but DATA, HEADERS and CONTINUATION."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.events import (
    GoAwayReceived,
    PingAcknowledged,
    StreamReset,
)
from shmserve.frontends.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from shmserve.frontends.http2.parts import ConnectionParts

_MAX_DEBUG_BYTES = 1024

_NAMES = {
    frames.PRIORITY: "PRIORITY", frames.RST_STREAM: "RST_STREAM", frames.SETTINGS: "SETTINGS",
    frames.PING: "PING", frames.GOAWAY: "GOAWAY", frames.WINDOW_UPDATE: "WINDOW_UPDATE",
}  # fmt: skip
_LENGTHS = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_OF_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_OF_STREAM = frozenset((frames.PRIORITY, frames.RST_STREAM))


class ControlFrames:
    """Checks and obeys control frames; each one costs a part of the budget.

    Args:
        parts: the connection's.
        now: the time in seconds, kept by whoever hands over frames.
    """

    __slots__ = (
        "_control", "_events", "_keepalive", "_limits", "_output", "_resets", "_sender",
        "_shutdown", "_streams", "now", "settings_acked",
    )  # fmt: skip

    def __init__(self, parts: ConnectionParts, now: float) -> None:
        self._limits = parts.limits
        self._streams = parts.streams
        self._sender = parts.sender
        self._output = parts.output
        self._keepalive = parts.keepalive
        self._shutdown = parts.shutdown
        self._control = parts.control
        self._resets = parts.resets
        self._events = parts.events
        self.now = now
        self.settings_acked = False

    def spend(self) -> None:
        """A frame that asks for little and means little."""
        if not self._control.spend(self.now):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")

    def forgive(self, stream_id: int) -> None:
        """A frame of a stream that is closed, which the client may not have known."""
        if not self._streams.is_forgiven(stream_id):
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, "a frame of a closed stream")
        self.spend()

    def fail_stream(self, stream_id: int, failed: StreamFailed) -> None:
        """Reset a stream for what the client did, or refuse it."""
        stream = self._streams.open.get(stream_id)
        if stream is None:
            self._streams.refuse(stream_id, failed.code)
        else:
            self._streams.reset(stream, failed.code)
            self._events.append(StreamReset(stream_id, failed.code, False, failed.reason))
        self._spend_reset()

    def _spend_reset(self) -> None:
        if not self._resets.spend(self.now):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """Obey a whole frame.

        Raises:
            StreamFailed: its stream is to be reset.
            ConnectionFailed: the connection is to end.
        """
        control = self._control
        left = min(control.left, control.burst) - 1
        if left >= 0:
            control.left = left
        else:
            self.spend()
        if kind == frames.WINDOW_UPDATE and len(payload) == 4:  # the most common by far
            self._on_window_update(stream_id, int.from_bytes(payload, "big"))
            return
        _check_form(kind, stream_id, len(payload))
        if kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, int.from_bytes(payload, "big"))
        elif kind == frames.PING:
            self._on_ping(flags, bytes(payload))
        elif kind == frames.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == frames.GOAWAY:
            code = int.from_bytes(payload[4:8], "big")
            self._events.append(GoAwayReceived(code, bytes(payload[8 : 8 + _MAX_DEBUG_BYTES])))

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        increment &= frames.LARGEST_WINDOW
        if not stream_id:
            if not increment:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a window opened by nothing")
            self._sender.open_window(increment)
            return
        stream = self._streams.open.get(stream_id)
        if stream is None:
            if self._streams.is_idle(stream_id):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE, idle stream")
        elif not increment:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "a window opened by nothing")
        else:
            self._sender.open_stream_window(stream, increment)

    def _on_rst_stream(self, stream_id: int, code: int) -> None:
        if self._streams.is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "RST_STREAM, idle stream")
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._streams.forget(stream)
            self._events.append(StreamReset(stream_id, code, True))
            self._spend_reset()

    def _on_ping(self, flags: int, data: bytes) -> None:
        if not flags & frames.ACK:
            self._output.add(frames.ping(data, frames.ACK))
            self._keepalive.on_ping(self.now, len(self._streams.open))
        elif not (self._keepalive.on_ack(data) or self._shutdown.on_ack(data)):
            self._events.append(PingAcknowledged(data))

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
                self._sender.shrink_table(value)  # the least of several counts
            values[identifier] = value
        sender = self._sender
        sender.max_frame = values.get(frames.MAX_FRAME_SIZE, sender.max_frame)
        window = values.get(frames.INITIAL_WINDOW_SIZE)
        if window is not None:
            sender.change_initial_window(window)
        self._output.add(frames.SETTINGS_ACK)


def _check_form(kind: int, stream_id: int, length: int) -> None:
    """A frame's length, and whether it is about a stream or the connection."""
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
