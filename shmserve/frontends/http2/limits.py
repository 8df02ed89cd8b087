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
    max_header_list_bytes: int = 16 << 10  # decoded, 32 per field on top; beyond: a refusal

    # Header blocks; beyond: the connection ends with ENHANCE_YOUR_CALM
    max_header_block_bytes: int = 32 << 10  # encoded, CONTINUATION included
    max_decoded_bytes: int = 64 << 10  # where decoding stops, and with it the connection
    max_continuations: int = 8
    remembered_blocks: int = 16
    remembered_block_bytes: int = 2048

    # Floods; beyond: the connection ends with ENHANCE_YOUR_CALM. ControlBudget says what is free
    control_burst: int = 2000  # control frames that no message and no stream has paid for
    control_per_s: float = 500.0
    reset_burst: int = 1000  # streams cancelled early, or that the client makes us refuse or reset
    reset_per_s: float = 100.0
    least_wait_s: float = 0.05  # shorter waits of unanswered streams are charged as this one
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

    def spend(self, now: float, cost: float = 1) -> bool:
        """Spend `cost` and return True, or return False if there is not so much left."""
        if self.left > self.burst:
            self.left = self.burst
        if self.left < cost:
            self.left = min(self.left + (now - self._at) * self._per_s, self.burst)
            self._at = now
            if self.left < cost:
                return False
        self.left -= cost
        return True


class ControlBudget(FloodBudget):
    """Pays for the client's control frames, so that floods end and busy clients are never cut off.

    The aim: traffic pays for all that honest clients send beside it, whatever its rate and however
    long it goes on. Time (burst and rate) pays for what is not in proportion to traffic.

    ======================  ======================================================================
    frame                   what pays for it
    ======================  ======================================================================
    WINDOW_UPDATE           `Http2Streams.updates`, then time. A DATA frame with content, sent or
                            received, adds two updates: gRPC's core sends one for the stream and
                            one for the connection with each message, however small. A KiB sent
                            adds one more, for clients that read large frames in pieces.
    PING                    the answer before the ping (`Keepalive`), then time. Clients that
                            estimate the bandwidth (Go, Java, .NET) send a ping with each answer.
    RST_STREAM, open        the stream, if DATA was sent on it. Such a stream, and each complete
                            response, adds one to the budget of resets, which pays for early
                            resets. The client's wait pays for other resets (`Waits`).
    RST_STREAM, closed      time: the client could not know yet that the stream was closed.
    DATA, closed stream     the window that the stream had left when we ended it. Late messages
                            are many where a client streams at full speed.
    SETTINGS, PRIORITY,     time. Each stream adds `STREAM_FRAMES`, because some clients send
    GOAWAY, empty or        PRIORITY or unknown frames with each request.
    unknown frames
    ======================  ======================================================================

    `updates` has no upper bound: a client that was stopped for a while owes two updates for each
    of thousands of small messages, all at once. A flood of updates therefore ends after twice the
    number of DATA frames (and KiB sent) before it, plus the burst. An update costs much less than
    the message that paid for it.
    """

    __slots__ = ()

    STREAM_FRAMES = 4
    UPDATES_PER_DATA = 2  # and one for each KiB that we sent
