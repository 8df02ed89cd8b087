"""Pings: how many a client may send, when we send one (gRPC's keepalive), and how we leave."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.frames import ConnectionFailed, ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.streams import Http2Streams, OutgoingBytes

_PROBE = b"keepaliv"
_LEAVING = b"draining"


class Keepalive:
    """A client that is silent is probed; one that probes us too often is sent away.

    Args:
        limits: the connection's.
        output: where pings go, and whether something was answered since the last one came.
    """

    __slots__ = ("_last_ping", "_limits", "_output", "_probed_at", "_strikes")

    def __init__(self, limits: Limits, output: OutgoingBytes) -> None:
        self._limits = limits
        self._output = output
        self._last_ping = float("-inf")
        self._strikes = 0
        self._probed_at: float | None = None

    def on_ping(self, now: float, open_streams: int) -> bool:
        """Note the client's ping; whatever we sent on a stream makes up for the pings before.

        Returns:
            True if something was sent on a stream since the last ping, which pays for this one.

        Raises:
            ConnectionFailed: too many pings came too early.
        """
        limits = self._limits
        calls = open_streams or limits.keepalive_without_calls
        least = limits.min_ping_interval_s if calls else limits.idle_ping_interval_s
        answered = self._output.take_answered()
        if answered:
            self._strikes = 0
        elif now - self._last_ping < least:
            self._strikes += 1
            if self._strikes > limits.max_ping_strikes:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping = now
        return answered

    def on_ack(self, data: bytes) -> bool:
        """True if it answers a probe of this object."""
        if data != _PROBE or self._probed_at is None:
            return False
        self._probed_at = None
        return True

    def due(self, open_streams: int, heard_at: float) -> float:
        """When `tick` has something to do. `heard_at`: when the client last sent anything."""
        if self._probed_at is not None:
            return self._probed_at + self._limits.keepalive_timeout_s
        if not open_streams and not self._limits.keepalive_without_calls:
            return float("inf")
        return heard_at + self._limits.keepalive_s

    def tick(self, now: float, open_streams: int, heard_at: float) -> None:
        """Probe if it is time.

        Raises:
            ConnectionFailed: a probe was not answered, nor has anything else come since.
        """
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

    The first GOAWAY asks for no new streams and names none, since some may be on their way.

    A ping follows it. What comes before its answer is served, and the second GOAWAY names the last
    of it: so a client knows of each call whether it may be repeated elsewhere.

    Attributes:
        began_at: the time of the first GOAWAY; None before.
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

    def on_ack(self, data: bytes) -> bool:
        """True if it answers the ping of this object."""
        if data != _LEAVING or self.began_at is None:
            return False
        self._name_last()
        return True

    def _name_last(self) -> None:
        if self._streams.last_served is None:
            last = self._streams.name_last()
            self._output.add(frames.goaway(last, ErrorCode.NO_ERROR, self._reason))

    def due(self) -> float:
        if self.began_at is None or self._streams.last_served is not None:
            return float("inf")
        return self.began_at + self._limits.drain_ping_s

    def tick(self, now: float) -> None:
        """A client that does not answer has had time enough to hear of it."""
        if now >= self.due():
            self._name_last()
