"""Pings: limits on the client's pings, the server's keepalive pings, and graceful shutdown."""

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.frames import ConnectionFailed, ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.streams import Http2Streams, OutgoingBytes

_PROBE = b"keepaliv"
_LEAVING = b"draining"


class Keepalive:
    """Probes a silent client, and ends the connection of a client that pings too often. `limits`:
    the connection's limits. `output`: takes pings, and records whether a response's frame was sent
    since the last ping."""

    __slots__ = ("_last_ping", "_limits", "_output", "_probed_at", "_strikes")

    def __init__(self, limits: Limits, output: OutgoingBytes) -> None:
        self._limits = limits
        self._output = output
        self._last_ping = float("-inf")
        self._strikes = 0
        self._probed_at: float | None = None

    def on_ping(self, now: float, open_streams: int) -> bool:
        """Count the client's ping. A response's frame since the last ping makes up for all earlier
        pings. Return True if there was such a frame, which pays for this ping. Raise
        ConnectionFailed if too many pings came too early."""
        limits = self._limits
        calls = open_streams or limits.keepalive_without_calls
        min_interval_s = limits.min_ping_interval_s if calls else limits.idle_ping_interval_s
        answered = self._output.take_answered()
        if answered:
            self._strikes = 0
        elif now - self._last_ping < min_interval_s:
            self._strikes += 1
            if self._strikes > limits.max_ping_strikes:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping = now
        return answered

    def on_ack(self, data: bytes) -> None:
        """Take a ping's answer, which may belong to a probe of this object."""
        if data == _PROBE:
            self._probed_at = None

    def due(self, open_streams: int, heard_at: float) -> float:
        """Return the time at which `tick` must act. `heard_at`: when the client last sent bytes."""
        if self._probed_at is not None:
            return self._probed_at + self._limits.keepalive_timeout_s
        if not open_streams and not self._limits.keepalive_without_calls:
            return float("inf")
        return heard_at + self._limits.keepalive_s

    def tick(self, now: float, open_streams: int, heard_at: float) -> None:
        """Probe the client if it is time. Raise ConnectionFailed if a probe was not answered, and
        the client has sent nothing since."""
        if self._probed_at is not None and heard_at > self._probed_at:
            self._probed_at = None
        if now < self.due(open_streams, heard_at):
            return
        if self._probed_at is not None:
            raise ConnectionFailed(ErrorCode.NO_ERROR, "keepalive timeout")
        self._probed_at = now
        self._output.add(frames.ping(_PROBE))


class Shutdown:
    """The two GOAWAYs of a graceful drain.

    The first GOAWAY asks for no new streams and names no last stream, since requests may be on
    their way. A ping follows. Requests that arrive before the answer to the ping are served, and
    the second GOAWAY names the last of these. So a client knows for each call whether to repeat
    the call elsewhere.

    `began_at`: the time of the first GOAWAY; None before.
    """

    __slots__ = ("_limits", "_output", "_reason", "_streams", "began_at")

    def __init__(self, limits: Limits, streams: Http2Streams, output: OutgoingBytes) -> None:
        self._limits = limits
        self._streams = streams
        self._output = output
        self._reason = ""
        self.began_at: float | None = None

    def begin(self, now: float, reason: str) -> None:
        if self.began_at is None:
            self.began_at, self._reason = now, reason
            goaway = frames.goaway(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR, reason)
            self._output.add(goaway)
            self._output.add(frames.ping(_LEAVING))

    def on_ack(self, data: bytes) -> None:
        """Take a ping's answer, which may belong to the ping of this object."""
        if data == _LEAVING and self.began_at is not None:
            self._name_last()

    def _name_last(self) -> None:
        if self._streams.last_served is None:
            last = self._streams.name_last()
            self._output.add(frames.goaway(last, ErrorCode.NO_ERROR, self._reason))

    def due(self) -> float:
        if self.began_at is None or self._streams.last_served is not None:
            return float("inf")
        return self.began_at + self._limits.drain_ping_s

    def tick(self, now: float) -> None:
        """Send the second GOAWAY after `drain_ping_s`, even if the ping was not answered."""
        if now >= self.due():
            self._name_last()
