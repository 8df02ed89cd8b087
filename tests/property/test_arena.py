"""The allocator and the slots' life against a small model (invariants I1 to I6)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shmserve.core.memory.arena import MAX_SHARED, Arena, NeedSegment, own_segment_size
from shmserve.core.memory.buddy import MIN_BLOCK, Buddy, order_of
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
            self.arena.add_segment(self.next_segment, size, found.shared, self.clock)
            self.segments[self.next_segment] = size
            self.next_segment += 1
            found = self.arena.reserve(nbytes)
        assert isinstance(found, Slot)
        assert found.size >= nbytes
        assert found.nbytes == nbytes
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
        slot.apply(SlotEvent.SEAL)
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
            slot.lease()
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
        assert (
            sum(size for _, size in self.buddy.free_blocks()) == self.buddy.size - self.buddy.used
        )

    def teardown(self) -> None:
        for offset, size in list(self.used.items()):
            self.buddy.free(offset, order_of(size))
        tops = [self.buddy.allocate(5) for _ in range(4)]
        assert None not in tops  # everything merges again


TestBuddy = BuddyMachine.TestCase
TestBuddy.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("event", SlotEvent)
def test_only_the_table_moves_a_slot(state: SlotState, event: SlotEvent) -> None:
    slot = Slot(0)
    slot.state = state
    target = TRANSITIONS.get((state, event))
    if target is None:
        with pytest.raises(ProtocolViolation):
            slot.apply(event)
        assert slot.state is state
    else:
        slot.apply(event)
        assert slot.state is target
        assert slot.generation == (1 if target is SlotState.FREE else 0)


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
