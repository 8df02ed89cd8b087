"""Slots: states, transitions, leases and generations of a slot.

A `Slot` is a range of bytes in a segment of one arena. Only the arena's owner process holds this
bookkeeping (I1, I7); peers know a slot by (slot, generation). Every change of state is a look-up
in `TRANSITIONS`, in the steps of `core.memory.slot_allocator`.

An input lies in the frontend's arena. It is reserved, filled from the socket, sealed, leased to
the executor by `Execute`, and released when the call is closed, after the answer went out. An
output lies in the executor's arena. It is reserved by the model (`request.output`) or by the
executor, sealed, leased to the frontend by `Answer`, and released by the frontend after its last
byte was sent. If an output is an input, or part of one, the answer names the input, and the
frontend sends its own slot.

A lease outlives its request in three cases, each with an end:

- Abandoned: the deadline passed, or the client went, while the executor works. The input stays
  leased until the late answer or the executor's EOF (`dispatch.pool.orphaned_requests`).
- Retained input: the model kept a view, as `Answer.retained` reports. A later `Answer.freed` or
  the executor's EOF ends the lease (`executor.tensors.request`).
- Held output: the model kept the array that it wrote to. The executor keeps a lease of its own
  until the array is collected.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from shmserve.errors import ProtocolViolation

NO_BYTES = memoryview(b"")


class SlotState(IntEnum):
    """States of a slot; each state's comment names the container."""

    FREE = 0  # in a free list of the Arena, with or without a block
    RESERVED = 1  # held by the writer
    SEALED = 2  # written, not yet handed to a reader
    LEASED = 3  # named in a message; `leases` readers have not released the slot


class SlotEvent(IntEnum):
    RESERVE = 0
    SEAL = 1
    LEASE = 2  # first and further leases
    RELEASE = 3  # a lease other than the last
    RELEASE_LAST = 4
    RECLAIM = 5  # the owner takes back a slot without readers


TRANSITIONS = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.RESERVED, SlotEvent.RECLAIM): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.SEALED, SlotEvent.RECLAIM): SlotState.FREE,
    (SlotState.LEASED, SlotEvent.LEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.RELEASE_LAST): SlotState.FREE,
}


class _Steps(dict[SlotState, SlotState]):
    """Part of the table for one event; a look-up of any other state raises ProtocolViolation."""

    def __init__(self, event: SlotEvent) -> None:
        super().__init__({s: after for (s, e), after in TRANSITIONS.items() if e is event})
        self._event = event

    def __missing__(self, state: SlotState) -> SlotState:
        raise ProtocolViolation(f"{self._event.name} of a slot that is {state.name}")


def step_of(event: SlotEvent) -> Callable[[SlotState], SlotState]:
    """Return the function from a state to the next state for an event. Made once per event,
    because every tensor takes several steps.

    The function raises ProtocolViolation if the event is not allowed in the state.
    """
    return _Steps(event).__getitem__


class Slot:
    """Slot of an arena. `offset` and `size` are bytes within `segment`; `size` is at least the
    requested size.

    `view`: writable memory of the requested `nbytes`, unless the slot is FREE.
    """

    __slots__ = (
        "generation", "leases", "nbytes", "number", "offset", "order", "segment", "size", "state",
        "view",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.state = SlotState.FREE
        self.leases = 0
        self.segment = 0
        self.offset = 0
        self.size = 0
        self.order = 0  # order of the block in a shared segment
        self.nbytes = 0
        self.view = NO_BYTES

    def __repr__(self) -> str:
        return (
            f"<slot {self.number} generation={self.generation} state={self.state.name} "
            f"leases={self.leases} segment={self.segment} offset={self.offset} size={self.size}>"
        )
