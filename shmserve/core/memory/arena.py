"""The allocator of one arena: slots in shared segments and in segments of their own.

Pure bookkeeping of the one process that writes the arena (I1): integers in, integers
out. It decides; `shmserve.shm.arena` maps memory and asks for budget. A tensor up to
`MAX_SHARED` bytes gets a block of a shared segment, a larger one a segment of its own,
which is kept for reuse when freed until `idle` hands it out for giving back.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.memory.buddy import MIN_BLOCK, Buddy, order_of
from shmserve.core.memory.slots import Slot, SlotEvent, SlotState
from shmserve.errors import StaleDescriptor

MAX_SHARED = 1 << 20
_MAX_ORDER = order_of(MAX_SHARED)
_MAX_WASTE = 2  # a cached segment may be this many times larger than the tensor


class NeedSegment(Struct, frozen=True):
    """No room: add a segment of at least `size` bytes (`shared` or for one tensor), ask again."""

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
    __slots__ = ("buddy", "freed_at", "number", "size", "slots")

    def __init__(self, number: int, size: int, shared: bool) -> None:
        self.number = number
        self.size = size
        self.buddy = Buddy(size, _MAX_ORDER) if shared else None
        self.slots = 0  # slots not FREE that lie in it
        self.freed_at = 0.0


def own_segment_size(nbytes: int) -> int:
    """Size of a segment for one tensor: quarter steps between powers of two, whole pages."""
    step = max(1 << max(nbytes.bit_length() - 3, 12), 4096)
    return -(-nbytes // step) * step


class Arena:
    """Slots, their segments and their states. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._shared: list[_Segment] = []
        self._cached: list[_Segment] = []  # own segments without a slot
        self._slots: list[Slot] = []
        self._free_numbers: list[int] = []

    def add_segment(self, number: int, size: int, shared: bool, now: float) -> None:
        """Take a new segment into use. `now` starts its idle time.

        A shared one is a multiple of `MAX_SHARED` bytes.
        """
        segment = _Segment(number, size, shared)
        segment.freed_at = now
        self._segments[number] = segment
        (self._shared if shared else self._cached).append(segment)

    def reserve(self, nbytes: int) -> Slot | NeedSegment:
        """A RESERVED slot of at least `nbytes` bytes, or the segment that is missing for it."""
        if nbytes <= MAX_SHARED:
            order = order_of(nbytes)
            for segment in self._shared:
                offset = segment.buddy.allocate(order) if segment.buddy else None
                if offset is not None:
                    slot = self._occupy(segment, offset, MIN_BLOCK << order, nbytes)
                    slot.order = order
                    return slot
            return NeedSegment(MAX_SHARED, True)
        fitting = [s for s in self._cached if nbytes <= s.size <= nbytes * _MAX_WASTE]
        if not fitting:
            return NeedSegment(own_segment_size(nbytes), False)
        segment = min(fitting, key=lambda s: s.size)
        self._cached.remove(segment)
        return self._occupy(segment, 0, segment.size, nbytes)

    def _occupy(self, segment: _Segment, offset: int, size: int, nbytes: int) -> Slot:
        if self._free_numbers:
            slot = self._slots[self._free_numbers.pop()]
        else:
            slot = Slot(len(self._slots))
            self._slots.append(slot)
        slot.apply(SlotEvent.RESERVE)
        slot.segment, slot.offset, slot.size, slot.nbytes = segment.number, offset, size, nbytes
        segment.slots += 1
        return slot

    def release(self, number: int, generation: int, now: float) -> bool:
        """A reader gives its lease back; True if the slot became free.

        Raises:
            StaleDescriptor: no such lease (a duplicate or a forged release).
        """
        if not 0 <= number < len(self._slots):
            raise StaleDescriptor(f"release of unknown slot {number}")
        slot = self._slots[number]
        last = slot.release(generation)
        if last:
            self._vacate(slot, now)
        return last

    def reclaim(self, slot: Slot, now: float) -> None:
        """The owner takes back a slot that no reader has (RESERVED or SEALED)."""
        slot.apply(SlotEvent.RECLAIM)
        self._vacate(slot, now)

    def _vacate(self, slot: Slot, now: float) -> None:
        segment = self._segments[slot.segment]
        segment.slots -= 1
        segment.freed_at = now
        if segment.buddy is not None:
            segment.buddy.free(slot.offset, slot.order)
        else:
            self._cached.append(segment)
        self._free_numbers.append(slot.number)

    def idle(self, before: float, nbytes: int | None = None) -> list[int]:
        """Drop segments unused since `before` (all but the first shared one), longest first.

        With `nbytes`, stop when that much is found. Returns their numbers; the caller
        frees the memory and gives the budget back.
        """
        spare = [s for s in self._shared[1:] if s.slots == 0] + self._cached
        found: list[int] = []
        total = 0
        for segment in sorted(spare, key=lambda s: s.freed_at):
            if segment.freed_at > before or (nbytes is not None and total >= nbytes):
                break
            (self._shared if segment.buddy is not None else self._cached).remove(segment)
            del self._segments[segment.number]
            found.append(segment.number)
            total += segment.size
        return found

    def slots(self) -> list[Slot]:
        """Every slot that is not FREE."""
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
