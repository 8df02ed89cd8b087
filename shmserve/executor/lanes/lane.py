"""One lane, as the loops see it: a connection like those of frontends."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.regions.region_book import Caller
from shmserve.errors import StaleDescriptor
from shmserve.executor.loop.connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control.data_messages import Descriptor
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.channel import Channel


class LaneCall(Struct, gc=False):
    """A request that is under way.

    Attributes:
        inline: inputs that came in the message, in their order.
        began_ns: when it was read; CLOCK_MONOTONIC, as all times.
        copied_in: bytes that were taken out of the message.
    """

    inline: tuple[bytes, ...]
    began_ns: int
    deadline_ns: int
    copied_in: int


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


class Lane(FrontendConnection):
    """A lane; its state is for `LaneChannels` to change.

    Attributes:
        waiting: requests that are not answered, by the caller's numbers.
        mask: what epoll looks for; that the other end has gone it tells of anyway.
        stalled_at: when it began not to take its answers, in seconds; 0: it does.
    """

    __slots__ = ("caller", "inline", "mask", "stalled_at", "waiting")

    def __init__(self, channel: Channel, caller: Caller) -> None:
        owner = LaneOwner(f"lane of {caller.uid}")
        super().__init__(channel, owner)
        self.caller = caller
        self.inline = owner.inline
        self.waiting: dict[int, LaneCall] = {}
        self.mask = 0
        self.stalled_at = 0.0
