"""A ModelInferRequest whose tensors are received straight into slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.memory.slots import Slot
from shmserve.errors import ShmserveError
from shmserve.frontends.dispatch_api import TensorMemory
from shmserve.frontends.grpc.announced_inputs import AnnouncedInputs
from shmserve.frontends.grpc.message_heap import MessageHeap, failed, take
from shmserve.frontends.http2.grpc_framing import GrpcMessage
from shmserve.protocol.protobuf.incoming_request import IncomingRequest


class PlacedTensor:
    """A slot that a tensor is received into, until it is taken or given back."""

    __slots__ = ("_memory", "_slot", "view")

    def __init__(self, slot: Slot, memory: TensorMemory) -> None:
        self.view = slot.view
        self._slot: Slot | None = slot
        self._memory = memory

    def take(self) -> Slot:
        slot, self._slot = self._slot, None
        assert slot is not None, "a slot is taken once"
        return slot

    def close(self) -> None:
        """Give it back, if nobody has taken it."""
        if self._slot is not None:
            self._memory.reclaim(self.take())


class TensorIntake(Struct, frozen=True, eq=False):
    """How the tensors of an rpc's messages are received.

    Attributes:
        memory: where slots come from.
        announced: what the head of a message says of them, if it does; raises what refuses it.
        quick: whether a message, with all its tensors in it, is read in next to no time.
    """

    memory: TensorMemory
    announced: Callable[[memoryview, Any], AnnouncedInputs | None]
    quick: Callable[[memoryview], bool]


class TensorMessage(IncomingRequest):
    """A receiver of one message, and then that message. Owns its slots until they are taken.

    A tensor gets a slot only where the head says that it fits its model; what is not told apart is
    gathered on the heap.

    Args:
        size: of the message.
        limits: what a request may have.
        intake: how it is received.
        context: its call.

    Attributes:
        announced: what its head says, once that was looked at.
        asked: somebody sees to the place that is wanted.

    Raises:
        FramingFailed: from whatever takes bytes, where the message is refused.
    """

    __slots__ = (
        "_closed", "_context", "_heap", "_intake", "_looked", "_memory", "_placed_tensors",
        "announced", "asked",
    )  # fmt: skip

    def __init__(self, size: int, limits: Settings, intake: TensorIntake, context: Any) -> None:
        super().__init__(size, limits)
        self._intake = intake
        self._memory = intake.memory
        self._context = context
        self.announced: AnnouncedInputs | None = None
        self._looked = False
        self._heap = MessageHeap(limits.max_heap_bytes)
        self._placed_tensors: list[PlacedTensor] = []
        self._closed = False
        self.asked = False

    def expected(self, size: int) -> bool:
        try:
            if not self._looked:
                self._looked = True
                self.announced = self._intake.announced(self.head, self._context)
            announced = self.announced
            return announced is not None and announced.fits(len(self.raw), size)
        except ShmserveError as ex:
            raise failed(ex) from None

    def gathered(self, count: int) -> None:
        take(self._heap, count)

    def placed(self, nbytes: int) -> PlacedTensor | None:
        slot = self._memory.reserve_now(nbytes)
        return None if slot is None else self._owned(slot)

    def _owned(self, slot: Slot) -> PlacedTensor:
        placed = PlacedTensor(slot, self._memory)
        self._placed_tensors.append(placed)
        return placed

    def grow(self) -> Slot | None:
        """The place that is wanted; None: there is no memory for it. Waits as
        `TensorMemory.reserve` does: for a thread that may."""
        try:
            return self._memory.reserve(self.wanted)
        except ShmserveError:
            return None

    def grown(self, slot: Slot | None) -> None:
        """What `grow` has found."""
        self.asked = False
        placed = None if slot is None else self._owned(slot)
        if self._closed:
            self.close()
        else:
            self.grant(placed)

    def message(self, compressed: bool) -> GrpcMessage:
        return GrpcMessage(compressed, self.rest(), self)

    def close(self) -> None:
        """Give back what nobody has taken. Idempotent."""
        self._closed = True
        self._heap.close()
        if self.announced is not None:
            self.announced.close()
        for placed in self._placed_tensors:
            placed.close()
