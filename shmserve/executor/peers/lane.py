"""Lane: a local program's own channel to the executor, which the loop treats like a frontend."""

import time

from msgspec import Struct, field

from shmserve.core.caller import Caller
from shmserve.errors import StaleDescriptor
from shmserve.executor.peers.frontend_connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control.data_messages import Descriptor, WireTensor
from shmserve.protocol.control.lane_messages import INLINE_BYTES, READ_AHEAD
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.stranger_channel import StrangerChannel


class LaneCall(Struct, gc=False):
    """A running request of a lane. All times are CLOCK_MONOTONIC.

    Attributes:
        inline: bytes of the inputs that came in the message, in order.
        began_ns: time when the request was read.
        deadline_ns: time limit of the answer, or of a stream's next answer.
        copied_in: number of bytes taken out of the message that no receipt has reported yet.
        credit: number of a stream's answers that may be under way; 0: the request has a single
            answer.
        answer_ns: longest time for each answer of a stream, including the time to take it.
        ends_ns: time limit of the whole stream.
        copied: bytes copied for earlier answers of a stream, as `RequestCounters` takes them.
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
        """Extend the deadline, as an answer of the stream was sent or taken."""
        self.deadline_ns = min(now_ns + self.answer_ns, self.ends_ns)

    def runs_late(self, now_ns: int) -> bool:
        """Return True once, when a stream's deadline has passed."""
        if self.late or not self.credit or self.deadline_ns > now_ns:
            return False
        self.late = True
        return True


class InlineOutput(WireTensor, frozen=True, kw_only=True):
    """An output whose bytes go into the lane's answer, straight from the model's array: the output
    takes no slot. Such an output never leaves the process."""

    data: bytes


class InlineTensors(PeerSegments):
    """Tensors that came in the messages of a lane, which has no segments.

    In a descriptor of such a tensor, `generation` is the number of the request and `slot` the
    index of the tensor in the request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, LaneCall] = {}

    def view(self, at: Descriptor) -> memoryview:
        """Return the bytes of a tensor. Raise StaleDescriptor if the request is over."""
        call = self.calls.get(at.generation)
        if call is None:
            raise StaleDescriptor("the request is over")
        return memoryview(call.inline[at.slot])


class _Nowhere(list[tuple[int, int]]):
    """List that stays empty: a lane is not told of freed slots, as views keep inline tensors
    alive."""

    def append(self, item: tuple[int, int], /) -> None:
        del item


class LaneUser(Struct, eq=False, weakref=True):
    """User of any number of lanes. `waiting`: number of the user's unanswered requests. `closer`:
    closes descriptors that the user has sent."""

    closer: DeferredClose
    waiting: int = 0


class LaneOwner(FrontendProcess):
    """The program at the end of a lane, in the place of a frontend process."""

    inline_bytes = INLINE_BYTES

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inline = self.segments = InlineTensors()
        self.freed = _Nowhere()

    def give_back(self, slots: list[tuple[int, int]], memory: ArenaMemory) -> None:
        """Release output slots whose bytes have been copied into an answer."""
        held = self.held
        for lease in slots:
            held[lease] -= 1
            if not held[lease]:
                del held[lease]
            try:
                memory.release(*lease)
            except StaleDescriptor:
                continue


class Lane(FrontendConnection, eq=False, kw_only=True):
    """A lane, as a connection of the loop.

    Attributes:
        caller: user and process at the end of the lane.
        owner: the lane as a frontend process, with the inline tensors.
        user: the user of the lane and of the same user's other lanes.
        waiting: unanswered requests, by the caller's numbers.
        leaving: new requests go to another executor. While streams are running, the lane still
            takes credit for the streams.
        decoupled: the model answers by streams.
        running: numbers of the streams that the model works on, also after the lane's end.
        stalled_at: time (monotonic, in seconds) at which the caller stopped taking answers; 0: the
            caller takes answers.
    """

    channel: StrangerChannel
    caller: Caller
    decoupled: bool
    owner: LaneOwner
    user: LaneUser
    leaving: bool = False
    running: set[int] = field(default_factory=set)
    waiting: dict[int, LaneCall] = field(default_factory=dict)
    stalled_at: float = 0.0

    @property
    def reads(self) -> bool:
        """Return True if messages are read now.

        No message is read while answers wait. No further request is read before there is room for
        the answer. Streams have room of their own, and need credit messages.
        """
        full = len(self.waiting) >= READ_AHEAD and not self.decoupled
        return not (self.backlog or self.refusing or full)

    @property
    def credit(self) -> int:
        """Return the number of answers that may be under way, over all streams of the lane."""
        return sum(call.credit for call in self.waiting.values())

    def took(self) -> None:
        """Note that the caller has taken an answer. On a refused lane, all last answers share one
        time limit."""
        if not self.backlog:
            self.stalled_at = 0.0
        elif not self.refusing:
            self.stalled_at = time.monotonic()

    def abandon(self) -> list[LaneCall]:
        """Forget and return the unanswered requests. Streams that the model goes on with stay in
        `running`."""
        self.running &= self.waiting.keys()
        calls = list(self.waiting.values())
        self.waiting.clear()
        return calls
