"""The arena of this process: `core.memory.slot_allocator`'s bookkeeping with memory behind it.

The arena is the only writer (I1) of its segments. Thread-safe: every decision is made under one
lock. Segments are made and mapped without the lock.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import Struct, field

from shmserve import waiting
from shmserve.core.memory.slot_allocator import Arena, ArenaStats, NeedSegment
from shmserve.core.memory.slots import Slot
from shmserve.errors import ArenaExhausted, StaleDescriptor, TooLarge, Unavailable
from shmserve.protocol.control.data_messages import Descriptor, SegmentOffer
from shmserve.shm.mappings import Mappings
from shmserve.shm.segment import Segment

_GRANT_TIMEOUT_S = 2.0  # a restarted coordinator needs less time


class Budget(Protocol):
    """Source of the pool's bytes: the coordinator, asked through the process's link."""

    @property
    def pool_bytes(self) -> int:
        """Bytes that all arenas together may have; 0: unknown."""
        ...

    def grant(self, nbytes: int, timeout_s: float) -> bool: ...

    def give_back(self, nbytes: int) -> None: ...


class ArenaMemory(Struct, eq=False):
    """Memory for slots that this process writes.

    Attributes:
        _budget: source of bytes.
        _epoch: returns a part of segment names.
        _shared_size: returns the size of a shared segment, in bytes; called when one is made.
        mappings: record of the process's mappings.
        first_size: bytes of a small first shared segment. Each further segment doubles the total,
            up to `shared_size`. 0: every segment has `shared_size`.
    """

    _budget: Budget
    _epoch: Callable[[], str]
    _shared_size: Callable[[], int]
    mappings: Mappings | None = None
    first_size: int = 0
    _arena: Arena = field(default_factory=Arena)
    _segments: dict[int, Segment] = {}
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _growing: threading.Lock = field(default_factory=threading.Lock)
    _next_segment: int = 1
    held_bytes: int = 0  # bytes of all segments
    drops: int = 0  # number of segments given back so far
    # Frees unneeded slots of about so many bytes; returns False if there are none.
    spare: Callable[[int], bool] = lambda nbytes: False

    def prepare(self) -> None:
        """Make the first segment now, so that no request waits for it. Raise ArenaExhausted if the
        budget or the shared memory is used up."""
        self.reclaim(self.reserve(1))

    def reserve(self, nbytes: int) -> Slot:
        """Return a slot to write to. The slot's `view` has exactly `nbytes` bytes.

        Waits only for the coordinator's grant, for a bounded time.

        Raise ArenaExhausted if the pool's budget or the shared memory is used up. Raise TooLarge if
        the whole pool is smaller than the slot.
        """
        with self._lock:
            slot = self._arena.reserve(nbytes)
        if type(slot) is NeedSegment:
            return waiting.beside(self._reserve_more, nbytes)
        return slot

    def _reserve_more(self, nbytes: int) -> Slot:
        slot: Slot | NeedSegment | None = None
        while not isinstance(slot, Slot):
            # One thread makes the shared segment for all waiting threads.
            if not self._growing.acquire(timeout=_GRANT_TIMEOUT_S):
                raise ArenaExhausted("no memory for tensors could be made ready in time")
            try:
                with self._lock:
                    slot = self._arena.reserve(nbytes)
                if isinstance(slot, NeedSegment):
                    self._grow(slot)
                    with self._lock:
                        slot = self._arena.reserve(nbytes)
            finally:
                self._growing.release()
        return slot

    def reserve_now(self, nbytes: int) -> Slot | None:
        """Return a slot in an existing segment, or None if no segment has room."""
        with self._lock:
            slot = self._arena.reserve(nbytes)
        return None if isinstance(slot, NeedSegment) else slot

    def _grow(self, need: NeedSegment) -> None:
        size = need.size
        if need.shared:
            shared_size = self._shared_size()
            if self.first_size:
                shared_size = min(shared_size, max(self.first_size, self._arena.shared_bytes))
            size = max(size, shared_size // size * size)
        pool = self._budget.pool_bytes
        if 0 < pool < size:
            raise TooLarge(
                f"memory of {size} bytes for a tensor is more than the whole pool of {pool} bytes"
                " (setting pool_bytes)"
            )
        if not self._budget.grant(size, _GRANT_TIMEOUT_S):
            if self.spare(size):
                self.trim(0.0, size)
                return  # the caller tries to reserve again
            raise ArenaExhausted(
                f"the pool (pool_bytes) has no {size} bytes more for tensors right now"
            )
        try:
            segment = Segment(self._epoch(), size)
        except BaseException:
            self._budget.give_back(size)
            raise
        with self._lock:
            number = self._next_segment
            self._next_segment += 1  # never reused: a peer may still map an old segment
            self._segments[number] = segment
            self.held_bytes += size
            self._arena.add_segment(number, size, need.shared, time.monotonic(), segment.view)
        if self.mappings is not None:
            self.mappings.mapped(segment.address, size, writable=True)

    def read(self, at: Descriptor) -> memoryview:
        """Return the bytes of a descriptor of this arena. The caller must hold a lease."""
        return self._segments[at.segment].view[at.offset : at.offset + at.nbytes].toreadonly()

    def descriptor(self, slot: Slot) -> Descriptor:
        """Return the descriptor with which a peer reads the slot."""
        return Descriptor(slot.segment, slot.number, slot.generation, slot.offset, slot.nbytes)

    def seal_and_lease(self, slot: Slot) -> Descriptor:
        """End writing (I2), add a lease for a reader, and return the reader's descriptor."""
        self._arena.seal_and_lease(slot)  # without the lock: no other thread knows the slot yet
        return Descriptor(slot.segment, slot.number, slot.generation, slot.offset, slot.nbytes)

    def lease(self, slot: Slot) -> None:
        """Add a lease on the slot for another reader."""
        with self._lock:
            self._arena.lease(slot)

    def release(self, number: int, generation: int) -> None:
        """Take a lease back."""
        if number < 0:
            self._release_foreign(number)
            return
        with self._lock:
            self._arena.release(number, generation, time.monotonic())

    def _release_foreign(self, number: int) -> None:
        """Release a lease with a negative number. The arena has none; a subclass may."""
        raise StaleDescriptor(f"no lease on slot {number}")

    def reclaim(self, slot: Slot) -> None:
        """Take back a slot that no reader has a lease on."""
        with self._lock:
            self._arena.reclaim(slot, time.monotonic())

    def offers(
        self, segments: Iterable[int], known: set[int]
    ) -> tuple[list[SegmentOffer], list[int]]:
        """Return offers and read-only fds of the segments that are not in a peer's `known` set.

        Adds the offered segments to `known`. The caller closes the fds after sending them.

        Raise Unavailable, with nothing offered, if this process has no descriptor left.
        """
        offers: list[SegmentOffer] = []
        fds: list[int] = []
        try:
            for number in segments:
                if number not in known:
                    segment = self._segments[number]
                    fds.append(segment.reader_fd())
                    offers.append(SegmentOffer(number, segment.size))
        except OSError as ex:
            for fd in fds:
                os.close(fd)
            raise Unavailable("too many open files") from ex
        known.update(offer.segment for offer in offers)
        return offers, fds

    def dropped(self, known: set[int]) -> tuple[int, ...]:
        """Return the peer's known segments that were given back, and remove them from `known`."""
        dropped = tuple(number for number in known if number not in self._segments)
        known.difference_update(dropped)
        return dropped

    def trim(self, idle_s: float = 0.0, nbytes: int | None = None) -> None:
        """Free segments unused for `idle_s` seconds, stopping once `nbytes` bytes are free."""
        with self._lock:
            numbers = self._arena.idle(time.monotonic() - idle_s, nbytes)
            segments = [self._segments.pop(number) for number in numbers]
            freed = sum(segment.size for segment in segments)
            self.held_bytes -= freed
            self.drops += len(segments)
        for segment in segments:
            self._unmapping(segment)
            segment.free()
        if freed:
            self._budget.give_back(freed)

    @property
    def may_shrink(self) -> bool:
        """True if `trim` can free a segment, now or once its slots are free."""
        return self._arena.may_shrink

    def stats(self) -> ArenaStats:
        with self._lock:
            return self._arena.stats()

    def rows(self, what: str) -> list[dict[str, Any]]:
        """Return the rows of `shmserve show segments` or `show slots`; for other tables no rows."""
        with self._lock:
            if what == "segments":
                return [{"segment": n, "bytes": s.size} for n, s in self._segments.items()]
            if what == "slots":
                return [
                    {
                        "segment": slot.segment,
                        "slot": slot.number,
                        "generation": slot.generation,
                        "state": slot.state.name,
                        "leases": slot.leases,
                        "offset": slot.offset,
                        "bytes": slot.nbytes,
                    }
                    for slot in self._arena.slots()
                ]
        return []

    def close(self) -> None:
        """Close all segments. Memory that peers still read lives until they have finished."""
        with self._lock:
            segments = list(self._segments.values())
            self._segments.clear()
            self._arena.let_go()
        for segment in segments:
            self._unmapping(segment)
            segment.close()

    def _unmapping(self, segment: Segment) -> None:
        if self.mappings is not None:
            self.mappings.unmapping(segment.address)
