"""A slot's life: states, transitions, leases, generations.

One `Slot` is a range of bytes in a segment of one arena. Only the arena's owner
process holds this bookkeeping (I1, I7); peers know a slot by (slot, generation).
Rule 1: every change of state goes through `TRANSITIONS`. Rule 2: nothing here
knows of memory, processes or time.
"""

from __future__ import annotations

from enum import IntEnum

from shmserve.errors import ProtocolViolation, StaleDescriptor


class SlotState(IntEnum):
    """Where a slot is; each state's comment names its container."""

    FREE = 0  # Arena's free numbers; its bytes are in the allocator's free lists
    RESERVED = 1  # held by the writer that reserved it
    SEALED = 2  # written, not yet handed to a reader
    LEASED = 3  # named in a message; `leases` readers have not released it


class SlotEvent(IntEnum):
    """What happens to a slot."""

    RESERVE = 0
    SEAL = 1
    LEASE = 2  # first and further leases
    RELEASE = 3  # a lease that is not the last
    RELEASE_LAST = 4
    RECLAIM = 5  # the owner takes back what nobody reads


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.RESERVED, SlotEvent.RECLAIM): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.SEALED, SlotEvent.RECLAIM): SlotState.FREE,
    (SlotState.LEASED, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE_LAST): SlotState.FREE,
}


class Slot:
    """One slot. `offset` and `size` are bytes within `segment`; `size` >= what was asked for."""

    __slots__ = (
        "generation",
        "leases",
        "nbytes",
        "number",
        "offset",
        "order",
        "segment",
        "size",
        "state",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.state = SlotState.FREE
        self.leases = 0
        self.segment = 0
        self.offset = 0
        self.size = 0
        self.order = 0  # of its block in a shared segment
        self.nbytes = 0

    def apply(self, event: SlotEvent) -> None:
        """Move to the next state.

        Raises:
            ProtocolViolation: the event is not allowed in this state.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise ProtocolViolation(f"{event.name} of {self!r}")
        if target is SlotState.FREE:
            self.generation += 1  # I4: only grows
        self.state = target

    def lease(self) -> None:
        self.apply(SlotEvent.LEASE)
        self.leases += 1

    def release(self, generation: int) -> bool:
        """Give one lease back; True if it was the last and the slot is free.

        Raises:
            StaleDescriptor: `generation` is not the slot's: this lease is long over.
        """
        if generation != self.generation or self.state is not SlotState.LEASED:
            raise StaleDescriptor(f"release of generation {generation} of {self!r}")
        last = self.leases == 1
        self.leases -= 1
        self.apply(SlotEvent.RELEASE_LAST if last else SlotEvent.RELEASE)
        return last

    def __repr__(self) -> str:
        return (
            f"<slot {self.number} generation={self.generation} state={self.state.name} "
            f"leases={self.leases} segment={self.segment} offset={self.offset} size={self.size}>"
        )
