"""Slot allocator: slots of one arena, in shared segments and in segments of their own.

Pure bookkeeping by the one process that writes the arena (I1), covering every step of a slot's
life. Only decisions: `shmserve.shm.arena` maps memory and asks for budget. A tensor up to
`MAX_SHARED` bytes gets a block of a shared segment. A larger tensor gets a segment of its own,
which is kept for reuse after it is freed, until `idle` returns the segment for giving back.

Blocks are powers of two from 256 bytes up, aligned to their size. Segments for one tensor come in
quarter steps between powers of two, and are given back after `segment_idle_s`. In steady state a
slot is taken from a list and put back.
"""

from typing import final

from msgspec import Struct

from shmserve.core.memory.buddy import MIN_BLOCK, Buddy
from shmserve.core.memory.slots import NO_BYTES, Slot, SlotEvent, SlotState, step_of
from shmserve.errors import StaleDescriptor

MAX_SHARED = 1 << 20
_MIN_BITS = (MIN_BLOCK - 1).bit_length()
_MAX_ORDER = (MAX_SHARED - 1).bit_length() - _MIN_BITS  # blocks are MIN_BLOCK << order bytes
_MAX_WASTE = 2  # a cached segment may be this many times larger than the tensor

_LEASED = SlotState.LEASED
_reserved, _sealed, _leased, _released, _released_last, _reclaimed = map(step_of, SlotEvent)


@final
class NeedSegment(Struct, frozen=True):
    """Lack of room: add a segment of at least `size` bytes (`shared` or for one tensor), then ask
    again."""

    size: int
    shared: bool


class ArenaStats(Struct, frozen=True):
    """Counters of one arena; sums over states equal `slots` (I6)."""

    slots: int
    free: int
    reserved: int
    sealed: int
    leased: int
    used_bytes: int
    segments: int
    segment_bytes: int


class _Segment:
    __slots__ = ("buddy", "freed_at", "number", "size", "slots", "view")

    def __init__(self, number: int, size: int, shared: bool, now: float, view: memoryview) -> None:
        self.number = number
        self.size = size
        self.buddy = Buddy(size, _MAX_ORDER) if shared else None
        self.slots = 0  # slots in the segment that are not FREE
        self.freed_at = now
        self.view = view


def own_segment_size(nbytes: int) -> int:
    """Return the size of a segment for one tensor: quarter steps between powers of two, whole
    pages."""
    step = max(1 << max(nbytes.bit_length() - 3, 12), 4096)
    return -(-nbytes // step) * step


class Arena:
    """Slots, segments and states of one arena. Not thread-safe: the owner locks.

    The first shared segment is never given back. So its blocks stay with their slots when freed,
    for the next tensor of the same size: a server in steady state takes a slot from one list and
    puts it back. Such blocks return to the allocator when a block is missing.
    """

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._shared: list[_Segment] = []
        self._first: _Segment | None = None  # first shared segment
        self._cached: list[_Segment] = []  # segments for one tensor, without a slot
        self._slots: list[Slot] = []
        # order -> FREE slots with a block
        self._ready: list[list[Slot]] = [[] for _ in range(_MAX_ORDER + 1)]
        self._bare: list[Slot] = []  # FREE slots without a block

    def add_segment(
        self, number: int, size: int, shared: bool, now: float, view: memoryview = NO_BYTES
    ) -> None:
        """Take a new segment into use. `now` starts its idle time; slots get parts of `view`.

        The size of a shared segment is a multiple of `MAX_SHARED`.
        """
        segment = self._segments[number] = _Segment(number, size, shared, now, view)
        (self._shared if shared else self._cached).append(segment)
        if shared and self._first is None:
            self._first = segment

    def reserve(self, nbytes: int) -> Slot | NeedSegment:
        """Return a RESERVED slot of at least `nbytes` bytes, or the segment that is missing."""
        if nbytes <= MAX_SHARED:
            order = max((nbytes - 1).bit_length() - _MIN_BITS, 0)
            ready = self._ready[order]
            slot = ready.pop() if ready else self._with_block(order)
        else:
            slot = self._with_segment(nbytes)
        if slot is None:
            shared = nbytes <= MAX_SHARED
            return NeedSegment(MAX_SHARED if shared else own_segment_size(nbytes), shared)
        slot.state = _reserved(slot.state)
        slot.nbytes = nbytes
        segment = self._segments[slot.segment]
        segment.slots += 1
        slot.view = segment.view[slot.offset : slot.offset + nbytes]
        return slot

    def seal(self, slot: Slot) -> None:
        """End the writing of a slot (I2)."""
        slot.state = _sealed(slot.state)

    def lease(self, slot: Slot) -> None:
        """Add a reader's lease to the slot."""
        slot.state = _leased(slot.state)
        slot.leases += 1

    def seal_and_lease(self, slot: Slot) -> None:
        """End the writing of a slot (I2), and lease the slot to the first reader."""
        slot.state = _leased(_sealed(slot.state))
        slot.leases = 1

    def release(self, number: int, generation: int, now: float) -> bool:
        """Release a reader's lease. Return True if the slot became free, else False. Raise
        StaleDescriptor for an unknown lease (a duplicate or a forged release)."""
        if not 0 <= number < len(self._slots):
            raise StaleDescriptor(f"release of unknown slot {number}")
        slot = self._slots[number]
        if generation != slot.generation or slot.state is not _LEASED:
            raise StaleDescriptor(f"release of generation {generation} of {slot!r}")
        last = slot.leases == 1
        slot.state = (_released_last if last else _released)(slot.state)
        slot.leases -= 1
        if last:
            self._vacate(slot, now)
        return last

    def reclaim(self, slot: Slot, now: float) -> None:
        """Free a slot without readers (RESERVED or SEALED) for its owner."""
        slot.state = _reclaimed(slot.state)
        self._vacate(slot, now)

    def _vacate(self, slot: Slot, now: float) -> None:
        slot.generation += 1  # I4: only grows
        slot.view = NO_BYTES
        segment = self._segments[slot.segment]
        segment.slots -= 1
        segment.freed_at = now
        if segment is self._first:
            self._ready[slot.order].append(slot)
            return
        if segment.buddy is not None:
            segment.buddy.free(slot.offset, slot.order)
        else:
            self._cached.append(segment)
        self._bare.append(slot)

    def _with_block(self, order: int) -> Slot | None:
        """Return a FREE slot with a block of a shared segment, or None if there is no room."""
        for segment in self._shared:
            assert segment.buddy is not None
            offset = segment.buddy.allocate(order)
            if offset is None and segment is self._first:
                self._return_blocks(segment.buddy)
                offset = segment.buddy.allocate(order)
            if offset is not None:
                return self._bound(segment, offset, MIN_BLOCK << order, order)
        return None

    def _return_blocks(self, buddy: Buddy) -> None:
        for ready in self._ready:
            for slot in ready:
                buddy.free(slot.offset, slot.order)
            self._bare += ready
            ready.clear()

    def _with_segment(self, nbytes: int) -> Slot | None:
        """Return a FREE slot with a cached segment of its own, or None if no segment fits."""
        fitting = [s for s in self._cached if nbytes <= s.size <= nbytes * _MAX_WASTE]
        if not fitting:
            return None
        segment = min(fitting, key=lambda s: s.size)
        self._cached.remove(segment)
        return self._bound(segment, 0, segment.size, 0)

    def _bound(self, segment: _Segment, offset: int, size: int, order: int) -> Slot:
        if self._bare:
            slot = self._bare.pop()
        else:
            slot = Slot(len(self._slots))
            self._slots.append(slot)
        slot.segment, slot.offset, slot.size = segment.number, offset, size
        slot.order = order
        return slot

    def idle(self, before: float, nbytes: int | None = None) -> list[int]:
        """Drop segments unused since `before` (all but the first shared segment), longest unused
        first.

        With `nbytes`, stop once the dropped segments have that many bytes. Return the segments'
        numbers; the caller frees the memory and gives the budget back.
        """
        spare = [s for s in self._shared[1:] if s.slots == 0] + self._cached
        numbers: list[int] = []
        total = 0
        for segment in sorted(spare, key=lambda s: s.freed_at):
            if segment.freed_at > before or (nbytes is not None and total >= nbytes):
                break
            (self._shared if segment.buddy is not None else self._cached).remove(segment)
            del self._segments[segment.number]
            numbers.append(segment.number)
            total += segment.size
        return numbers

    @property
    def may_shrink(self) -> bool:
        """True if `idle` can drop a segment, now or once its slots are free."""
        return bool(self._cached) or len(self._shared) > 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of all shared segments."""
        return sum(segment.size for segment in self._shared)

    def let_go(self) -> None:
        """Give memory to no further slot. Slots in use keep their memory until they are freed."""
        for segment in self._segments.values():
            segment.view = NO_BYTES

    def slots(self) -> list[Slot]:
        """Return every slot that is not FREE."""
        return [slot for slot in self._slots if slot.state is not SlotState.FREE]

    def stats(self) -> ArenaStats:
        counts = [0] * len(SlotState)
        used = 0
        for slot in self._slots:
            counts[slot.state] += 1
            used += slot.size if slot.state is not SlotState.FREE else 0
        return ArenaStats(
            slots=len(self._slots),
            free=counts[SlotState.FREE],
            reserved=counts[SlotState.RESERVED],
            sealed=counts[SlotState.SEALED],
            leased=counts[SlotState.LEASED],
            used_bytes=used,
            segments=len(self._segments),
            segment_bytes=sum(s.size for s in self._segments.values()),
        )
