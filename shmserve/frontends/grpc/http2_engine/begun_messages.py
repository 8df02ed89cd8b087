"""Begun messages of a connection: memory for their tensors, and deadlines for the remaining bytes.

A deadline grows with the bytes that have arrived, by the time for at most `AHEAD` bytes at once.
So a client that announces a large message and sends nothing gets only the time of a message of
`AHEAD` bytes.

If memory for a tensor must first be made, a thread makes the memory. Meanwhile the connection is
not read, for at most 2 s. Without memory by then, the message is received on the heap.
"""

from collections.abc import Callable
from functools import partial
from time import monotonic

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.memory.slots import Slot
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2.grpc_framing import FramingFailed

AHEAD = 8 << 20
_WAIT_S = 2.0  # seconds for memory; later the message is received on the heap


class MessageDeadline(Struct, eq=False):
    """Deadline of one message. `left`: bytes that have not arrived. `due`: bytes of `left` that
    must arrive until the deadline. `until`: the deadline (monotonic clock, seconds)."""

    left: int
    due: int
    until: float

    def advance(self, left: int, now: float, timeout_s: float, per_s: float) -> None:
        """Note that `left` bytes have not arrived. Arrived bytes earn time for the next bytes."""
        self.due -= self.left - left
        self.left = left
        if self.due <= 0:
            self.due = min(left, AHEAD)
            self.until = min(self.until, now + timeout_s) + self.due / per_s


class MessageDeadlines:
    """Deadlines of the begun messages of a connection, in `open` by stream."""

    __slots__ = ("_per_s", "_timeout_s", "open")

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.body_timeout_s
        self._per_s = settings.min_bytes_per_s
        self.open: dict[int, MessageDeadline] = {}

    def look(self, stream_id: int, left: int, now: float) -> None:
        """Note that `left` bytes of a stream's message have not arrived yet."""
        deadline = self.open.get(stream_id)
        if deadline is None or left > deadline.left:  # another message
            due = min(left, AHEAD)
            until = now + self._timeout_s + due / self._per_s
            self.open[stream_id] = MessageDeadline(left, due, until)
            return
        deadline.advance(left, now, self._timeout_s, self._per_s)

    def extend(self, stream_id: int, now: float) -> None:
        """Restart the time of a stream's message, because the client could not send."""
        deadline = self.open.pop(stream_id, None)
        if deadline is not None:
            self.look(stream_id, deadline.left, now)

    @property
    def next_due(self) -> float:
        """The earliest deadline; inf without begun messages."""
        return min((deadline.until for deadline in self.open.values()), default=float("inf"))

    def overdue(self, now: float) -> list[int]:
        """Return the streams with a message past its deadline."""
        return [stream_id for stream_id, deadline in self.open.items() if now >= deadline.until]


class BegunMessages:
    """Begun messages of a connection. Belongs to the loop, which never waits for memory: another
    thread makes memory.

    Args:
        serving: state shared by all connections.
        go_on: continues with a call's message after its memory has been made.
        refuse: refuses a call's message.
        resume: has the connection receive again, once `waiting` is 0.

    Attributes:
        waiting: number of tensors without memory; while positive, nothing may be received.
        deadlines: deadlines of all begun messages.
    """

    def __init__(
        self,
        serving: Serving,
        go_on: Callable[[Http2Call], None],
        refuse: Callable[[Http2Call, FramingFailed], None],
        resume: Callable[[], None],
    ) -> None:
        self._loop = serving.loop
        self._growth = serving.growth
        self._go_on, self._refuse = go_on, refuse
        self._resume = resume
        self.waiting = 0
        self.deadlines = MessageDeadlines(serving.settings)

    def grow(self, call: Http2Call, message: TensorMessage) -> None:
        """Have a thread make the memory that a message needs."""
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
            self._go_on(call)
        except FramingFailed as failed:
            self._refuse(call, failed)
        if not self.waiting:
            self._resume()
