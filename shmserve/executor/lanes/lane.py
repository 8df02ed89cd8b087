"""One lane, as the loops see it: a connection like those of frontends."""

from __future__ import annotations

import select
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.regions.region_book import Caller
from shmserve.errors import StaleDescriptor
from shmserve.executor.loop.connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control.data_messages import Cancel, Credit, Descriptor, Execute
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.channel import Channel

# What has come on a connection; None: it is closed, nothing of it is wanted any more.
Event = tuple[FrontendConnection, Execute | Cancel | Credit | None]


class LoopSide(Struct, frozen=True):
    """What lanes share with the executor's other channels: who waits for them, who is told."""

    epoll: select.epoll
    events: Callable[[Event], None]
    wake: Callable[[], None]


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
    """A lane; its state is for `LaneChannels` to change.

    Attributes:
        waiting: requests that are not answered, by the caller's numbers.
        leaving: its requests go elsewhere; while streams are under way, their credit still comes.
        mask: what epoll looks for; that the other end has gone it tells of anyway.
        running: streams that the model has, by the same numbers; after the lane's end as well.
        stalled_at: when it began not to take its answers, in seconds; 0: it does.
    """

    __slots__ = ("caller", "inline", "leaving", "mask", "owner", "running", "stalled_at", "waiting")

    def __init__(self, channel: Channel, caller: Caller) -> None:
        owner = LaneOwner(f"lane of {caller.uid}")
        super().__init__(channel, owner)
        self.caller = caller
        self.owner = owner
        self.inline = owner.inline
        self.leaving = False
        self.running: set[int] = set()
        self.waiting: dict[int, LaneCall] = {}
        self.mask = 0
        self.stalled_at = 0.0

    @property
    def credit(self) -> int:
        """How many answers of its streams may be under way."""
        return sum(call.credit for call in self.waiting.values())
