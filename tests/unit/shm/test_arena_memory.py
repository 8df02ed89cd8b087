"""Slots with memory behind them."""

from __future__ import annotations

import os

import pytest

from shmserve.core.memory.slots import SlotState
from shmserve.errors import (
    ArenaExhausted,
    ProtocolViolation,
    StaleDescriptor,
    TooLarge,
    Unavailable,
)
from shmserve.protocol.control.data_messages import Descriptor
from shmserve.shm.arena import ArenaMemory
from tests.no_descriptors import no_descriptors
from tests.running_server import open_fds
from tests.unit.rig import Unlimited


@pytest.fixture
def memory():
    memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
    yield memory
    memory.close()


def test_sealing_and_leasing_tells_what_a_reader_needs(memory: ArenaMemory) -> None:
    memory.reserve(1000)
    slot = memory.reserve(1000)
    slot.view[:] = bytes(1000)
    at = memory.seal_and_lease(slot)
    assert at == Descriptor(slot.segment, slot.number, slot.generation, slot.offset, 1000)
    assert (slot.state, slot.leases) == (SlotState.LEASED, 1)
    with pytest.raises(ProtocolViolation):
        memory.seal_and_lease(slot)
    memory.release(at.slot, at.generation)
    with pytest.raises(StaleDescriptor):
        memory.release(at.slot, at.generation)


def test_memory_that_another_is_making_is_waited_for_no_longer_than_that(memory, monkeypatch):
    monkeypatch.setattr("shmserve.shm.arena._GRANT_TIMEOUT_S", 0.02)
    with memory._growing, pytest.raises(ArenaExhausted, match="in time"):
        memory.reserve(1000)
    memory.prepare()


def test_what_is_there_now_is_had_without_waiting(memory: ArenaMemory) -> None:
    assert memory.reserve_now(1000) is None
    memory.prepare()
    slot = memory.reserve_now(1000)
    assert len(slot.view) == 1000
    assert memory.reserve_now(2 << 20) is None  # needs a separate segment
    memory.reclaim(memory.reserve(2 << 20))
    again = memory.reserve_now(2 << 20)
    assert again is not None
    memory.reclaim(again)
    memory.reclaim(slot)


def test_an_arena_that_begins_small_doubles_up_to_its_full_size() -> None:
    memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 6 << 20, first_size=1 << 20)
    slots, held = [], []
    for _ in range(16):  # each is a whole MiB
        slots.append(memory.reserve(1 << 20))
        held.append(memory.held_bytes >> 20)
    assert held == [1, 2, 4, 4, 8, 8, 8, 8, 14, 14, 14, 14, 14, 14, 20, 20]
    for slot in slots:
        memory.reclaim(slot)
    memory.trim()
    assert memory.held_bytes == 1 << 20  # and begins again from this point
    memory.close()


def test_in_steady_state_a_tensor_gets_the_same_bytes_again(memory: ArenaMemory) -> None:
    other = memory.reserve(300)
    descriptors = []
    for _ in range(3):
        slot = memory.reserve(5000)
        at = memory.seal_and_lease(slot)
        memory.release(at.slot, at.generation)
        descriptors.append((at.segment, at.slot, at.offset))
    assert len(set(descriptors)) == 1
    memory.reclaim(other)
    assert memory.stats().free == memory.stats().slots


@pytest.mark.parametrize("nbytes", [0, 1, 256, 257, 1 << 20, (1 << 20) + 1])
def test_a_view_has_the_length_that_was_asked_for(memory: ArenaMemory, nbytes: int) -> None:
    slot = memory.reserve(nbytes)
    assert len(slot.view) == nbytes
    slot.view[:] = b"\xff" * nbytes
    again = memory.reserve(nbytes)
    again.view[:] = bytes(nbytes)
    assert bytes(slot.view) == b"\xff" * nbytes


def test_after_close_slots_in_use_keep_their_memory_until_they_are_freed() -> None:
    memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
    slot = memory.reserve(10)
    memory.close()
    slot.view[:] = b"0123456789"
    memory.reclaim(slot)
    assert len(slot.view) == 0


def test_without_descriptors_nothing_is_offered_and_nothing_taken_for_known(memory) -> None:
    segments = [memory.reserve(1 << 20).segment for _ in range(2)]
    known: set[int] = set()
    with no_descriptors(but=1), pytest.raises(Unavailable, match="too many open files"):
        memory.offers(segments, known)
    assert known == set()
    before = open_fds(os.getpid())
    offers, fds = memory.offers(segments, known)
    assert [offer.segment for offer in offers] == segments
    assert known == set(segments)
    for fd in fds:
        os.close(fd)
    assert open_fds(os.getpid()) == before


def test_a_segment_of_its_own_may_be_given_back_and_the_first_shared_one_not(memory) -> None:
    large = memory.reserve(2 << 20)
    assert not memory.may_shrink  # the memory is in use
    memory.reclaim(large)
    assert memory.may_shrink
    memory.trim()
    memory.prepare()
    assert not memory.may_shrink
    slots = [memory.reserve(1 << 20) for _ in range(2)]
    for slot in slots:
        memory.reclaim(slot)
    assert memory.may_shrink
    memory.trim()
    assert (memory.may_shrink, memory.stats().segments) == (False, 1)


def test_what_the_pool_can_never_hold_is_not_asked_for() -> None:
    class Small(Unlimited):
        pool_bytes = 4 << 20

        def grant(self, nbytes: int, timeout_s: float) -> bool:
            assert nbytes <= self.pool_bytes
            return False

    memory = ArenaMemory(Small(), lambda: "cafe0123", lambda: 1 << 20)
    with pytest.raises(TooLarge, match=r"whole pool of 4194304 bytes \(setting pool_bytes\)"):
        memory.reserve((4 << 20) + 1)
    with pytest.raises(ArenaExhausted, match="right now"):
        memory.reserve(4 << 20)
    memory.close()
