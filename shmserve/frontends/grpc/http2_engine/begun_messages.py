"""Messages of one connection that have begun: memory for their tensors, and time for the rest.

How long clients may take: the deadlines grow with what has come. Nobody gains more than the time
for `AHEAD` bytes, so whoever announces a large message and sends nothing is waited for as if it
were small.

Where memory for a tensor has to be made first, a thread makes it. The connection is not read
meanwhile, for 2 s at most; without memory by then the message is received on the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.memory.slots import Slot
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2.grpc_framing import FramingFailed


class TensorCalls(Protocol):
    """The calls whose messages these are."""

    def go_on(self, call: Http2Call) -> None:
        """Go on with a message that has its memory now."""
        ...

    def refuse(self, call: Http2Call, failed: FramingFailed) -> None:
        """One is not taken."""
        ...


AHEAD = 8 << 20
_WAIT_S = 2.0  # for memory; later it is received on the heap


class MessageDeadline(Struct, eq=False):
    """Of one message: `left` bytes of it are to come, and `due` of these until `until`."""

    left: int
    due: int
    until: float

    def advance(self, left: int, now: float, timeout_s: float, per_s: float) -> None:
        """Note that `left` bytes are still to come. What has come earns time for what follows."""
        self.due -= self.left - left
        self.left = left
        if self.due <= 0:
            self.due = min(left, AHEAD)
            self.until = min(self.until, now + timeout_s) + self.due / per_s


class MessageDeadlines:
    """Those of one connection, in `open` by stream."""

    __slots__ = ("_per_s", "_timeout_s", "open")

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.body_timeout_s
        self._per_s = settings.min_bytes_per_s
        self.open: dict[int, MessageDeadline] = {}

    def look(self, stream_id: int, left: int, now: float) -> None:
        """Note that `left` bytes of a stream's message are to come now."""
        known = self.open.get(stream_id)
        if known is None or left > known.left:  # another message
            due = min(left, AHEAD)
            until = now + self._timeout_s + due / self._per_s
            self.open[stream_id] = MessageDeadline(left, due, until)
            return
        known.advance(left, now, self._timeout_s, self._per_s)

    def extend(self, stream_id: int, now: float) -> None:
        """Begin the time of a stream's message anew: the client could not send."""
        begun = self.open.pop(stream_id, None)
        if begun is not None:
            self.look(stream_id, begun.left, now)

    @property
    def next_due(self) -> float:
        """When `overdue` has something to say, at the latest."""
        return min((one.until for one in self.open.values()), default=float("inf"))

    def overdue(self, now: float) -> list[int]:
        """Streams whose message has not come in time."""
        return [stream_id for stream_id, one in self.open.items() if now >= one.until]


class BegunMessages:
    """Belongs to the loop's turn, in which nobody waits for memory: another thread makes it.

    Args:
        serving: what all connections share.
        calls: are told of what becomes of messages.
        resume: has the connection receive again, after `waiting`.

    Attributes:
        waiting: so many parts of what comes next have no place yet: nothing is to be received.
        deadlines: of all messages that have begun.
    """

    def __init__(
        self,
        serving: Serving,
        calls: TensorCalls,
        resume: Callable[[], None],
    ) -> None:
        self._loop = serving.loop
        self._growth = serving.growth
        self._calls = calls
        self._resume = resume
        self.waiting = 0
        self.deadlines = MessageDeadlines(serving.settings)

    def grow(self, call: Http2Call, message: TensorMessage) -> None:
        """Have a thread make the memory that a message wants."""
        if message.ask():
            self.waiting += 1
            self._growth.submit(self._grow, call, message, monotonic() + _WAIT_S)

    def _grow(self, call: Http2Call, message: TensorMessage, until: float) -> None:
        slot = None
        try:
            if call.is_active() and monotonic() < until:
                slot = message.grow()
        finally:
            self._loop.post(partial(self._grown, call, message, slot))

    def _grown(self, call: Http2Call, message: TensorMessage, slot: Slot | None) -> None:
        self.waiting -= 1
        try:
            message.grown(slot)
            self._calls.go_on(call)
        except FramingFailed as failed:
            self._calls.refuse(call, failed)
        if not self.waiting:
            self._resume()
