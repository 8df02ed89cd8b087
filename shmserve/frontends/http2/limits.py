"""Limits of one connection: sizes, numbers, rates and times, all in one place."""

import msgspec

from shmserve.frontends.http2 import frames


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a connection, with times in seconds. All connections share one object. Raise
    ValueError if the protocol does not allow a value."""

    # Announced to the client in SETTINGS
    max_frame_bytes: int = 1 << 20
    stream_window: int = 16 << 20
    connection_window: int = 64 << 20
    max_streams: int = 256
    max_header_list_bytes: int = 16 << 10  # decoded, plus 32 per field; a larger list is refused

    # Header blocks; beyond these limits the connection ends with ENHANCE_YOUR_CALM
    max_header_block_bytes: int = 32 << 10  # encoded, CONTINUATION included
    max_decoded_bytes: int = 64 << 10  # decoding stops here, and the connection ends
    max_continuations: int = 8
    remembered_blocks: int = 16
    remembered_block_bytes: int = 2048

    # Floods; beyond these limits the connection ends with ENHANCE_YOUR_CALM. See ControlBudget
    control_burst: int = 2000  # control frames not paid for by messages or streams
    control_per_s: float = 500.0
    # streams cancelled early, or refused or reset for faults of the client
    reset_burst: int = 1000
    reset_per_s: float = 100.0
    least_wait_s: float = 0.05  # least charge for the wait of an unanswered stream
    max_settings: int = 32  # in one frame
    max_control_bytes: int = 128 << 10  # answers to control frames, unread by the client

    # Sending
    # framed and not yet sent; more bytes stay in the queues of streams
    high_water_bytes: int = 1 << 20
    max_queued_sends: int = 64  # per stream
    reset_streams_remembered: int = 256  # streams whose late frames are accepted and dropped

    # Time
    settings_timeout_s: float = 10.0  # for preface and acknowledgement of SETTINGS
    # for a header block, or for the rest of a partial frame without DATA
    header_timeout_s: float = 10.0
    # longest silence within the payload of DATA or of a discarded frame
    frame_stall_s: float = 30.0
    send_stall_s: float = 30.0  # longest time to take `min_progress_bytes`, per stream and in all
    min_progress_bytes: int = 4096
    drain_ping_s: float = 5.0  # longest time from the first GOAWAY to the second

    # Pings, with the defaults of other gRPC servers
    keepalive_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 300.0
    idle_ping_interval_s: float = 7200.0  # while no stream is open
    max_ping_strikes: int = 2
    keepalive_without_calls: bool = False  # whether both sides may probe while no stream is open

    def __post_init__(self) -> None:
        """Check the limits. Lower bounds are the values that a client may assume before SETTINGS
        arrive."""
        windows = (self.stream_window, self.connection_window)
        if not all(frames.DEFAULT_WINDOW <= w <= frames.LARGEST_WINDOW for w in windows):
            raise ValueError("windows must be between 65535 and 2147483647")
        if not (frames.DEFAULT_FRAME_BYTES <= self.max_frame_bytes <= frames.LARGEST_FRAME_BYTES):
            raise ValueError("max_frame_bytes must be between 16384 and 16777215")


class FloodBudget:
    """Token bucket: `burst` at once and `per_s` per second. The refill is computed only when tokens
    run out. `burst`: tokens at the start, and the largest number ever. `per_s`: tokens that come
    back per second. `now`: the time in seconds."""

    __slots__ = ("_at", "_per_s", "burst", "left")

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        self.burst = burst
        self._per_s = per_s
        self._at = now
        self.left: float = burst  # streams add what traffic has earned

    def spend(self, now: float, cost: float = 1) -> bool:
        """Spend `cost` and return True, or return False if less is left."""
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

    Traffic pays for the control frames that honest clients send in proportion to traffic, at any
    rate and for any time. Time (burst and rate) pays for other control frames.

    ======================  ======================================================================
    frame                   paid for by
    ======================  ======================================================================
    WINDOW_UPDATE           `Http2Streams.updates`, then time. A DATA frame with content, sent or
                            received, adds two updates: gRPC's core sends one for the stream and
                            one for the connection with each message, however small. A KiB sent
                            adds one more, for clients that read large frames in pieces.
    PING                    the answer before the ping (`Keepalive`), then time. Clients that
                            estimate the bandwidth (Go, Java, .NET) send a ping with each answer.
    RST_STREAM, open        the stream, if DATA was sent. Such a stream, and each complete
                            response, adds one to the budget of resets, which pays for early
                            resets. The client's wait pays for other resets (`Waits`).
    RST_STREAM, closed      time: the client could not know yet that the stream was closed.
    DATA, closed stream     the rest of the stream's window when the server ended the stream.
                            A client that streams at full speed sends many late messages.
    SETTINGS, PRIORITY,     time. Each stream adds `STREAM_FRAMES`, because some clients send
    GOAWAY, empty or        PRIORITY or unknown frames with each request.
    unknown frames
    ======================  ======================================================================

    `updates` has no upper bound: a client that was stopped for a while owes two updates for each
    of thousands of small messages, all at once. A flood of updates therefore ends after twice the
    number of earlier DATA frames (plus KiB sent), plus the burst. An update costs much less than
    the message that paid.
    """

    __slots__ = ()

    STREAM_FRAMES = 4
    UPDATES_PER_DATA = 2  # plus one for each KiB sent
