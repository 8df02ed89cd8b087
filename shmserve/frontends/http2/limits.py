"""What one connection may ask for: sizes, numbers, rates and times, all in one place."""

from __future__ import annotations

import msgspec

from shmserve.frontends.http2 import frames


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a connection; times are in seconds. The same object serves all of them.

    Raises:
        ValueError: a value that the protocol does not allow.
    """

    # Told to the client in SETTINGS
    max_frame_bytes: int = 1 << 20
    stream_window: int = 16 << 20
    connection_window: int = 64 << 20
    max_streams: int = 256
    max_header_list_bytes: int = 16 << 10  # decoded, 32 per field on top; beyond: that stream ends

    # Header blocks; beyond: the connection ends with ENHANCE_YOUR_CALM
    max_header_block_bytes: int = 32 << 10  # encoded, CONTINUATION included
    max_decoded_bytes: int = 64 << 10  # where decoding stops, and with it the connection
    max_continuations: int = 8
    remembered_blocks: int = 16
    remembered_block_bytes: int = 2048

    # Floods; beyond: the connection ends with ENHANCE_YOUR_CALM
    control_burst: int = 2000  # SETTINGS, PING, PRIORITY, WINDOW_UPDATE, empty and unknown frames
    control_per_s: float = 500.0
    reset_burst: int = 1000  # streams that the client cancels, or makes us refuse or reset
    reset_per_s: float = 100.0
    max_settings: int = 32  # in one frame
    max_control_bytes: int = 128 << 10  # answers to control frames that the client does not read

    # Sending
    high_water_bytes: int = 1 << 20  # framed and not yet sent; more stays in the streams' queues
    max_queued_sends: int = 64  # of one stream
    reset_streams_remembered: int = 256  # whose late frames are forgiven

    # Time
    settings_timeout_s: float = 10.0  # preface, and then the client's acknowledgement
    header_timeout_s: float = 10.0  # from a header block's first frame to its last
    frame_stall_s: float = 30.0  # without a byte, within a frame
    send_stall_s: float = 30.0  # without `min_progress_bytes` taken, by stream and in all
    min_progress_bytes: int = 4096
    drain_ping_s: float = 5.0  # from the first GOAWAY to the second, at most

    # Pings, with the defaults of other gRPC servers
    keepalive_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 300.0
    idle_ping_interval_s: float = 7200.0  # the same while no stream is open
    max_ping_strikes: int = 2
    keepalive_without_calls: bool = False  # probe clients without streams, too; so may they

    def __post_init__(self) -> None:
        """The least values are what a client may assume before it has read our SETTINGS."""
        windows = (self.stream_window, self.connection_window)
        if not all(frames.DEFAULT_WINDOW <= w <= frames.LARGEST_WINDOW for w in windows):
            raise ValueError("windows must be between 65535 and 2147483647")
        if not (frames.DEFAULT_FRAME_BYTES <= self.max_frame_bytes <= frames.LARGEST_FRAME_BYTES):
            raise ValueError("max_frame_bytes must be between 16384 and 16777215")


class FloodBudget:
    """So many at once and so many per second; the clock is asked only when it runs out.

    Args:
        burst: what there is to begin with, and the most there ever is.
        per_s: what comes back per second.
        now: the time in seconds.
    """

    __slots__ = ("_at", "_per_s", "burst", "left")

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        self.burst = burst
        self._per_s = per_s
        self._at = now
        self.left: float = burst  # others add to it what they find was earned

    def spend(self, now: float, cost: int = 1) -> bool:
        """False if there is not so much left."""
        if self.left > self.burst:
            self.left = self.burst
        self.left -= cost
        if self.left >= 0:
            return True
        self.left = min(self.left + (now - self._at) * self._per_s, self.burst)
        self._at = now
        return self.left >= 0
