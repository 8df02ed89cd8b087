"""Slots that outlive their answer: leases of frontends, arrays that a model has kept."""

from __future__ import annotations

import logging
import weakref

from shmserve.core.memory.slots import SlotState
from shmserve.errors import StaleDescriptor
from shmserve.executor.loop.connections import FrontendProcess
from shmserve.executor.outputs import Placement
from shmserve.executor.tensors.inputs import ExecutorRequest, Input, Offer
from shmserve.protocol.control.data_messages import Execute, RegionRef
from shmserve.shm.arena import ArenaMemory

log = logging.getLogger(__name__)


class Holdings:
    """Decides who holds the slots of an answer. Safe from any thread but for `settle`."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._let_go: list[tuple[int, int]] = []  # appended to by finalizers

    def lease(self, placement: Placement) -> list[tuple[int, int]]:
        """Lease the outputs to a frontend; (slot, generation) of each."""
        leases = []
        for slot in placement.slots:
            self._memory.lease(slot)
            leases.append((slot.number, slot.generation))
        for offer in placement.offers:
            if offer.still_held():
                self._hold(offer)
        return leases

    def undo(self, placement: Placement) -> None:
        """Take back what a failed response had placed."""
        offered = {offer.slot.number for offer in placement.offers}
        for slot in placement.slots:
            if slot.number not in offered:
                self._memory.reclaim(slot)
        for offer in placement.offers:
            self._give_up(offer)
        placement.clear()

    def drop_offers(self, request: ExecutorRequest) -> None:
        """Take back what the model asked for and did not use."""
        while request.offers:
            self._give_up(request.offers.popitem()[1])

    def retained(
        self, request: ExecutorRequest, frontend: FrontendProcess, message: Execute
    ) -> tuple[int, ...]:
        """Indices of inputs that the model kept views of; `freed` tells when they are gone."""
        kept: list[int] = []
        index = -1  # among those in slots
        for tensor, wire in zip(request.inputs.values(), message.inputs, strict=True):
            at = wire.at
            if isinstance(at, RegionRef):
                continue  # a view keeps the mapping, and that is all there is to keep
            assert isinstance(tensor, Input)
            index += 1
            if tensor.still_held():
                kept.append(index)
                lease = (at.slot, at.generation)
                tensor.when_let_go(frontend.freed.append, lease)
        return tuple(kept)

    def settle(self) -> None:
        """Release what models have let go of since; for one thread only."""
        while self._let_go:
            try:
                self._memory.release(*self._let_go.pop())
            except StaleDescriptor as ex:
                log.error("a held slot was released twice: %s", ex)

    def _give_up(self, offer: Offer) -> None:
        if offer.still_held():
            self._hold(offer)
        else:
            self._memory.reclaim(offer.slot)

    def _hold(self, offer: Offer) -> None:
        """The model kept the array of its output: it could write there, so a lease of our
        own keeps the slot from being used again until the array is gone."""
        slot = offer.slot
        if slot.state is SlotState.RESERVED:
            self._memory.seal(slot)
        self._memory.lease(slot)
        weakref.finalize(offer.base, self._let_go.append, (slot.number, slot.generation))
