"""One lane, as the loop sees it: a connection like those of frontends."""

from __future__ import annotations

import time

from msgspec import Struct

from shmserve.core.caller import Caller
from shmserve.errors import StaleDescriptor
from shmserve.executor.peers.frontend_connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control.data_messages import Descriptor
from shmserve.protocol.control.lane_messages import READ_AHEAD
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.channel import Channel


class LaneCall(Struct, gc=False):
    """A request that is under way.

    Attributes:
        inline: inputs that came in the message, in their order.
        began_ns: when it was read; CLOCK_MONOTONIC, as all times.
        deadline_ns: of its answer, of a stream's next one.
        copied_in: bytes that were taken out of the message and that no receipt tells of yet.
        credit: of a stream, how many answers may be under way; 0: it has one.
        answer_ns: how long each answer of a stream, and taking it, may take.
        ends_ns: when a stream ends at the latest.
        copied: by earlier answers of a stream, as `RequestCounters` wants it.
        late: the stream was cancelled at its deadline.
    """

    inline: tuple[bytes, ...]
    began_ns: int
    deadline_ns: int
    copied_in: int
    credit: int = 0
    answer_ns: int = 0
    ends_ns: int = 0
    copied: tuple[int, ...] = (0, 0, 0, 0)
    late: bool = False

    def moved(self, now_ns: int) -> None:
        """An answer of the stream has gone or was taken: the next one may take as long."""
        self.deadline_ns = min(now_ns + self.answer_ns, self.ends_ns)

    def runs_late(self, now_ns: int) -> bool:
        """Return True once, when a stream's deadline has passed."""
        if self.late or not self.credit or self.deadline_ns > now_ns:
            return False
        self.late = True
        return True


class InlineTensors(PeerSegments):
    """What a lane has instead of segments: tensors that came in messages. A descriptor's
    `generation` is the number of the request, its `slot` counts the tensors of that one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, LaneCall] = {}

    def view(self, at: Descriptor) -> memoryview:
        """Raises StaleDescriptor: that request is over."""
        call = self.calls.get(at.generation)
        if call is None:
            raise StaleDescriptor("the request is over")
        return memoryview(call.inline[at.slot])


class _Nowhere(list[tuple[int, int]]):
    """Takes what nobody wants to know: inline tensors live as long as views of them anyway."""

    def append(self, item: tuple[int, int], /) -> None:
        del item


class LaneOwner(FrontendProcess):
    """Who a lane's requests are run for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inline = self.segments = InlineTensors()
        self.freed = _Nowhere()

    def give_back(self, slots: list[tuple[int, int]], memory: ArenaMemory) -> None:
        """The bytes of these output slots are on their way."""
        held = self.held
        for lease in slots:
            held[lease] -= 1
            if not held[lease]:
                del held[lease]
            try:
                memory.release(*lease)
            except StaleDescriptor:
                continue


class Lane(FrontendConnection):
    """A lane.

    Attributes:
        waiting: requests that are not answered, by the caller's numbers.
        leaving: its requests go elsewhere; while streams are under way, their credit still comes.
        decoupled: its requests are answered by streams.
        running: streams that the model has, by the same numbers; after the lane's end as well.
        stalled_at: when it began not to take its answers, in seconds; 0: it does.
    """

    __slots__ = (
        "caller",
        "decoupled",
        "inline",
        "leaving",
        "owner",
        "running",
        "stalled_at",
        "waiting",
    )

    def __init__(self, channel: Channel, caller: Caller, decoupled: bool) -> None:
        owner = LaneOwner(f"lane of {caller.uid}")
        super().__init__(channel, owner)
        self.caller = caller
        self.decoupled = decoupled
        self.owner = owner
        self.inline = owner.inline
        self.leaving = False
        self.running: set[int] = set()
        self.waiting: dict[int, LaneCall] = {}
        self.stalled_at = 0.0

    @property
    def reads(self) -> bool:
        """Return True if messages are of use now: no further request before there is room for its
        answer. Streams, which have room of their own, need what comes."""
        full = len(self.waiting) >= READ_AHEAD and not self.decoupled
        return not (self.backlog or self.refusing or full)

    @property
    def streams_wait(self) -> bool:
        """Return True while streams are under way, which need credit."""
        return self.decoupled and bool(self.waiting)

    @property
    def credit(self) -> int:
        """How many answers of its streams may be under way."""
        return sum(call.credit for call in self.waiting.values())

    def leave(self) -> None:
        """Have further requests go elsewhere."""
        self.leaving = True

    def stalls(self) -> None:
        """Note when the lane began not to take its answers."""
        self.stalled_at = self.stalled_at or time.monotonic()

    def took(self) -> None:
        """Note that the lane has taken an answer. The last answers share one limit."""
        if not self.backlog:
            self.stalled_at = 0.0
        elif not self.refusing:
            self.stalled_at = time.monotonic()

    def abandon(self) -> list[LaneCall]:
        """Forget the requests that wait. Return them. Streams that the model goes on with stay in
        `running`."""
        self.running &= self.waiting.keys()
        calls = list(self.waiting.values())
        self.waiting.clear()
        return calls
