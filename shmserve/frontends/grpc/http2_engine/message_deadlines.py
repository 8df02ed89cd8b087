"""How long clients may take for messages that have begun: the deadlines grow with what has come.

Nobody gains more than the time for `AHEAD` bytes, so whoever announces a large message and sends
nothing is waited for as if it were small.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.config import Settings

AHEAD = 8 << 20


class MessageDeadline(Struct, eq=False):
    """Of one message: `left` bytes of it are to come, and `due` of these until `until`."""

    left: int
    due: int
    until: float


class MessageDeadlines:
    """Those of one connection, in `open` by stream."""

    __slots__ = ("_per_s", "_timeout_s", "open")

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.body_timeout_s
        self._per_s = settings.min_bytes_per_s
        self.open: dict[int, MessageDeadline] = {}

    def look(self, stream_id: int, left: int | None, now: float) -> None:
        """So much is to come of a stream's message now; None: none has begun."""
        if left is None:
            if self.open:
                self.open.pop(stream_id, None)
            return
        known = self.open.get(stream_id)
        if known is None or left > known.left:  # another message
            due = min(left, AHEAD)
            until = now + self._timeout_s + due / self._per_s
            self.open[stream_id] = MessageDeadline(left, due, until)
            return
        known.due -= known.left - left
        known.left = left
        if known.due <= 0:
            known.due = min(left, AHEAD)
            known.until = min(known.until, now + self._timeout_s) + known.due / self._per_s

    @property
    def next_due(self) -> float:
        """When `overdue` has something to say, at the latest."""
        return min((one.until for one in self.open.values()), default=float("inf"))

    def overdue(self, now: float) -> list[int]:
        """Streams whose message has not come in time."""
        return [stream_id for stream_id, one in self.open.items() if now >= one.until]
