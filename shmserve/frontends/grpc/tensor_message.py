"""A ModelInferRequest whose tensors are received straight into slots."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.memory.slots import Slot
from shmserve.errors import ShmserveError
from shmserve.frontends.dispatch_api import TensorMemory
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


class TensorMessage(IncomingRequest):
    """A receiver of one message, and then that message. Owns its slots until they are taken.

    Args:
        size: of the message.
        limits: what a request may have.
        memory: where slots come from.

    Attributes:
        asked: somebody sees to the place that is wanted.
    """

    __slots__ = ("_closed", "_memory", "_placed_tensors", "asked")

    def __init__(self, size: int, limits: Settings, memory: TensorMemory) -> None:
        super().__init__(size, limits, self._placed_now)
        self._memory = memory
        self._placed_tensors: list[PlacedTensor] = []
        self._closed = False
        self.asked = False

    def _placed_now(self, nbytes: int) -> PlacedTensor | None:
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
        for placed in self._placed_tensors:
            placed.close()
