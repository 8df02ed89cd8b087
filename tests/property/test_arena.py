"""The allocator and the slots' life against a small model (invariants I1 to I6)."""

import itertools
import mmap

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shmserve.core.memory.buddy import MIN_BLOCK, Buddy
from shmserve.core.memory.slot_allocator import MAX_SHARED, Arena, NeedSegment, own_segment_size
from shmserve.core.memory.slots import TRANSITIONS, Slot, SlotEvent, SlotState
from shmserve.errors import ProtocolViolation, StaleDescriptor

SIZES = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([4096, 65536, MAX_SHARED - 1, MAX_SHARED, MAX_SHARED + 1, 3 * MAX_SHARED]),
)


class ArenaMachine(RuleBasedStateMachine):
    """Model: a dict of live slots; every range is disjoint, every lease is counted."""

    reserved = Bundle("reserved")
    sealed = Bundle("sealed")
    leased = Bundle("leased")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.segments: dict[int, int] = {}
        self.next_segment = 1
        self.live: dict[int, Slot] = {}
        self.generations: dict[int, int] = {}
        self.clock = 0.0

    @rule(target=reserved, nbytes=SIZES)
    def reserve(self, nbytes: int) -> Slot:
        found = self.arena.reserve(nbytes)
        if isinstance(found, NeedSegment):
            size = found.size * 2 if found.shared else found.size
            view = memoryview(mmap.mmap(-1, size))
            self.arena.add_segment(self.next_segment, size, found.shared, self.clock, view)
            self.segments[self.next_segment] = size
            self.next_segment += 1
            found = self.arena.reserve(nbytes)
        assert isinstance(found, Slot)
        assert found.size >= nbytes
        assert found.nbytes == len(found.view) == nbytes
        assert found.offset % 64 == 0
        if found.size >= 4096:
            assert found.offset % 4096 == 0
        assert found.offset + found.size <= self.segments[found.segment]
        assert found.generation >= self.generations.get(found.number, 0)  # I4
        assert found.number not in self.live  # I3
        self.live[found.number] = found
        return found

    @rule(target=sealed, slot=consumes(reserved))
    def seal(self, slot: Slot) -> Slot:
        self.arena.seal(slot)
        return slot

    @rule(target=leased, slot=consumes(reserved))
    def seal_and_lease(self, slot: Slot) -> Slot:
        self.arena.seal_and_lease(slot)
        return slot

    @rule(slot=consumes(reserved))
    def reclaim_reserved(self, slot: Slot) -> None:
        self._gone(slot)
        self.arena.reclaim(slot, self.clock)

    @rule(slot=consumes(sealed))
    def reclaim_sealed(self, slot: Slot) -> None:
        self._gone(slot)
        self.arena.reclaim(slot, self.clock)

    @rule(target=leased, slot=consumes(sealed), readers=st.integers(1, 3))
    def lease(self, slot: Slot, readers: int) -> Slot:
        for _ in range(readers):
            self.arena.lease(slot)
        return slot

    @rule(slot=consumes(leased))
    def release_all(self, slot: Slot) -> None:
        generation = slot.generation
        self._gone(slot)
        for left in range(slot.leases, 0, -1):
            assert self.arena.release(slot.number, generation, self.clock) is (left == 1)
        with pytest.raises(StaleDescriptor):
            self.arena.release(slot.number, generation, self.clock)

    @rule(slot=leased)
    def stale_release_is_refused(self, slot: Slot) -> None:
        with pytest.raises(StaleDescriptor):
            self.arena.release(slot.number, slot.generation + 1, self.clock)

    @rule(after=st.floats(0.1, 5))
    def time_passes(self, after: float) -> None:
        self.clock += after

    @rule(age=st.floats(0, 3))
    def trim(self, age: float) -> None:
        for number in self.arena.idle(self.clock - age):
            assert all(slot.segment != number for slot in self.live.values())
            del self.segments[number]

    def _gone(self, slot: Slot) -> None:
        del self.live[slot.number]
        self.generations[slot.number] = slot.generation + 1

    @invariant()
    def ranges_are_disjoint(self) -> None:
        ranges = sorted((s.segment, s.offset, s.offset + s.size) for s in self.live.values())
        for (seg_a, _, end), (seg_b, start, _) in itertools.pairwise(ranges):
            assert seg_a != seg_b or end <= start

    @invariant()
    def books_add_up(self) -> None:
        stats = self.arena.stats()
        assert stats.free + stats.reserved + stats.sealed + stats.leased == stats.slots  # I6
        assert stats.slots - stats.free == len(self.live)
        assert stats.segment_bytes == sum(self.segments.values())
        assert stats.used_bytes == sum(slot.size for slot in self.live.values())


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


class BuddyMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.buddy = Buddy(4 * (MIN_BLOCK << 5), 5)
        self.used: dict[int, int] = {}

    @rule(target=blocks, order=st.integers(0, 5))
    def allocate(self, order: int) -> tuple[int, int] | None:
        offset = self.buddy.allocate(order)
        if offset is None:
            return None
        size = MIN_BLOCK << order
        assert offset % size == 0
        for other, length in self.used.items():
            assert offset + size <= other or other + length <= offset
        self.used[offset] = size
        return offset, order

    @rule(block=consumes(blocks))
    def free(self, block: tuple[int, int] | None) -> None:
        if block is not None:
            del self.used[block[0]]
            self.buddy.free(*block)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.buddy.used == sum(self.used.values())
        free = sum(len(blocks) * (MIN_BLOCK << k) for k, blocks in enumerate(self.buddy._free))
        assert free == self.buddy.size - self.buddy.used

    def teardown(self) -> None:
        for offset, size in list(self.used.items()):
            self.buddy.free(offset, (size // MIN_BLOCK).bit_length() - 1)
        tops = [self.buddy.allocate(5) for _ in range(4)]
        assert None not in tops  # everything merges again


TestBuddy = BuddyMachine.TestCase
TestBuddy.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


WAYS: dict[SlotState, tuple[SlotEvent, ...]] = {
    SlotState.FREE: (SlotEvent.RESERVE, SlotEvent.RECLAIM),
    SlotState.RESERVED: (SlotEvent.RESERVE,),
    SlotState.SEALED: (SlotEvent.RESERVE, SlotEvent.SEAL),
    SlotState.LEASED: (SlotEvent.RESERVE, SlotEvent.SEAL, SlotEvent.LEASE),
}


def step(arena: Arena, event: SlotEvent, slot: Slot | None) -> Slot:
    """Apply an event to the arena."""
    if event is SlotEvent.RESERVE:
        reserved = arena.reserve(100)
        assert isinstance(reserved, Slot)
        return reserved
    assert slot is not None
    if event is SlotEvent.SEAL:
        arena.seal(slot)
    elif event is SlotEvent.LEASE:
        arena.lease(slot)
    elif event is SlotEvent.RECLAIM:
        arena.reclaim(slot, 0.0)
    else:
        arena.release(slot.number, slot.generation, 0.0)
    return slot


def slot_in(arena: Arena, state: SlotState) -> Slot:
    arena.add_segment(1, MAX_SHARED, True, 0.0)
    slot: Slot | None = None
    for event in WAYS[state]:
        slot = step(arena, event, slot)
    assert slot is not None
    assert slot.state is state
    return slot


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("event", [e for e in SlotEvent if e is not SlotEvent.RELEASE])
def test_only_the_table_moves_a_slot(state: SlotState, event: SlotEvent) -> None:
    arena = Arena()
    slot = slot_in(arena, state)
    generation = slot.generation
    if event is SlotEvent.RESERVE and state is not SlotState.FREE:
        assert step(arena, event, None) is not slot
        assert slot.state is state
    elif (state, event) not in TRANSITIONS:
        with pytest.raises(ProtocolViolation):
            step(arena, event, slot)
        assert (slot.state, slot.generation) == (state, generation)
    else:
        assert step(arena, event, slot) is slot
        target = TRANSITIONS[state, event]
        assert slot.state is target
        assert slot.generation == generation + (target is SlotState.FREE)  # I4


@pytest.mark.parametrize("state", SlotState)
def test_seal_and_lease_is_those_two_steps_of_the_table(state: SlotState) -> None:
    arena = Arena()
    slot = slot_in(arena, state)
    if state is SlotState.RESERVED:
        arena.seal_and_lease(slot)
        assert (slot.state, slot.leases) == (SlotState.LEASED, 1)
    else:
        before = (slot.state, slot.leases, slot.generation)
        with pytest.raises(ProtocolViolation):
            arena.seal_and_lease(slot)
        assert (slot.state, slot.leases, slot.generation) == before


def test_a_lease_that_is_not_the_last_leaves_the_slot_leased() -> None:
    arena = Arena()
    slot = slot_in(arena, SlotState.LEASED)
    arena.lease(slot)
    assert not arena.release(slot.number, slot.generation, 0.0)
    assert slot.state is TRANSITIONS[SlotState.LEASED, SlotEvent.RELEASE]
    assert arena.release(slot.number, slot.generation, 0.0)


def test_blocks_kept_for_the_next_tensor_of_their_size_are_found_by_a_larger_one() -> None:
    arena = Arena()
    arena.add_segment(1, MAX_SHARED, True, 0.0)
    slots = [arena.reserve(MAX_SHARED // 4) for _ in range(4)]
    for slot in slots:
        assert isinstance(slot, Slot)
        arena.reclaim(slot, 0.0)
    whole = arena.reserve(MAX_SHARED)
    assert isinstance(whole, Slot)
    assert (whole.offset, whole.size) == (0, MAX_SHARED)
    assert isinstance(arena.reserve(1), NeedSegment)


def test_a_freed_slot_shows_no_memory() -> None:
    arena = Arena()
    arena.add_segment(1, MAX_SHARED, True, 0.0, memoryview(bytearray(MAX_SHARED)))
    slot = arena.reserve(10)
    assert isinstance(slot, Slot)
    slot.view[:] = b"0123456789"
    arena.reclaim(slot, 0.0)
    assert len(slot.view) == 0


@pytest.mark.parametrize("nbytes", [MAX_SHARED + 1, 16 << 20, (16 << 20) + 1, 256 << 20, 10**9 + 7])
def test_own_segments_waste_at_most_a_quarter(nbytes: int) -> None:
    size = own_segment_size(nbytes)
    assert size >= nbytes
    assert size % 4096 == 0
    assert size <= nbytes * 1.25 + 4096


def test_own_segments_are_reused_for_like_sizes_only() -> None:
    arena = Arena()
    need = arena.reserve(16 << 20)
    assert need == NeedSegment(16 << 20, False)
    arena.add_segment(1, 16 << 20, False, 0.0)
    slot = arena.reserve(16 << 20)
    assert isinstance(slot, Slot)
    arena.reclaim(slot, 1.0)
    assert isinstance(arena.reserve(2 << 20), NeedSegment)  # would waste 14 MiB
    assert isinstance(arena.reserve(12 << 20), Slot)


def test_trim_keeps_the_first_shared_segment_and_respects_the_amount() -> None:
    arena = Arena()
    for number in (1, 2):
        arena.add_segment(number, MAX_SHARED, True, 0.0)
    for number in (3, 4, 5):
        arena.add_segment(number, 4 << 20, False, float(number))
    assert arena.idle(100.0, nbytes=4 << 20) == [2, 3]
    assert arena.idle(100.0) == [4, 5]
    assert arena.idle(100.0) == []
