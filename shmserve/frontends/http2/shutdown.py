"""Leaving: the two GOAWAYs of a graceful drain."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.frames import ErrorCode
from shmserve.frontends.http2.limits import Limits
from shmserve.frontends.http2.output import OutgoingBytes
from shmserve.frontends.http2.streams import Http2Streams

_PROBE = b"draining"


class Shutdown:
    """The first GOAWAY asks for no new streams and names none, since some may be on their way.

    A ping follows it. What comes before its answer is served, and the second GOAWAY names the last
    of it: so a client knows of each call whether it may be repeated elsewhere.
    """

    __slots__ = ("_began_at", "_last_served", "_limits", "_output", "_streams")

    def __init__(self, limits: Limits, streams: Http2Streams, output: OutgoingBytes) -> None:
        self._limits = limits
        self._streams = streams
        self._output = output
        self._began_at: float | None = None
        self._last_served: int | None = None

    def begin(self, now: float) -> None:
        if self._began_at is None:
            self._began_at = now
            self._output.add(frames.goaway(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
            self._output.add(frames.ping(_PROBE))

    @property
    def began(self) -> bool:
        return self._began_at is not None

    def serves(self, stream_id: int) -> bool:
        return self._last_served is None or stream_id <= self._last_served

    def on_ack(self, data: bytes) -> bool:
        """True if it answers the ping of this object."""
        if data != _PROBE or self._began_at is None:
            return False
        self._name_last()
        return True

    def _name_last(self) -> None:
        if self._last_served is None:
            self._last_served = self._streams.last_id
            self._output.add(frames.goaway(self._last_served, ErrorCode.NO_ERROR))

    def due(self) -> float:
        if self._began_at is None or self._last_served is not None:
            return float("inf")
        return self._began_at + self._limits.drain_ping_s

    def tick(self, now: float) -> None:
        """A client that does not answer has had time enough to hear of it."""
        if now >= self.due():
            self._name_last()

    @property
    def finished(self) -> bool:
        """All that was to be served is."""
        return self._last_served is not None and not self._streams.open
