"""The arena of this process: `core.memory.slot_allocator`'s bookkeeping with memory behind it.

The one writer (I1) of its segments. Thread-safe: every decision runs under one lock,
making and mapping segments does not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shmserve import waiting
from shmserve.core.memory.slot_allocator import Arena, ArenaStats, NeedSegment
from shmserve.core.memory.slots import Slot
from shmserve.errors import ArenaExhausted, StaleDescriptor, TooLarge, Unavailable
from shmserve.protocol.control.data_messages import Descriptor, SegmentOffer
from shmserve.shm.mappings import Mappings
from shmserve.shm.segment import Segment

_GRANT_TIMEOUT_S = 2.0  # a restarted coordinator is back by then


class Budget(Protocol):
    """Who grants the pool's bytes: the coordinator, through the process's link."""

    @property
    def pool_bytes(self) -> int:
        """What there is to grant to all; 0: not known."""
        ...

    def grant(self, nbytes: int, timeout_s: float) -> bool: ...

    def give_back(self, nbytes: int) -> None: ...


class ArenaMemory:
    """Slots one can write to.

    Args:
        budget: who grants bytes.
        epoch: goes into segment names.
        shared_size: bytes of a shared segment, asked for when one is made.
        now: the clock, seconds.
        mappings: the process's book of what it has mapped.
        first_size: bytes of the first shared segment, where it should begin small: each that
            follows doubles what there is, up to `shared_size`. 0: all have that.
    """

    def __init__(
        self,
        budget: Budget,
        epoch: Callable[[], str],
        shared_size: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        mappings: Mappings | None = None,
        first_size: int = 0,
    ) -> None:
        self._budget = budget
        self._epoch = epoch
        self._shared_size = shared_size
        self._first_size = first_size
        self._arena = Arena()
        self._segments: dict[int, Segment] = {}
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._next_segment = 1
        self._now = now
        self._mappings = mappings
        self._held = 0
        self.drops = 0  # how many segments were given back so far
        # Lets go of slots that are kept without need, of so many bytes; False: there are none
        self.spare: Callable[[int], bool] = lambda nbytes: False

    def prepare(self) -> None:
        """Make the first segment now, so that no request pays for it.

        Raises:
            ArenaExhausted: no budget, or no shared memory.
        """
        self.reclaim(self.reserve(1))

    def reserve(self, nbytes: int) -> Slot:
        """A slot to write to: its `view` is exactly `nbytes` long.

        Raises:
            ArenaExhausted: the pool's budget or the shared memory is used up. Waits for
                nothing but the coordinator's word, and for that a bounded time.
            TooLarge: the whole pool is smaller.
        """
        with self._lock:
            slot = self._arena.reserve(nbytes)
        if type(slot) is NeedSegment:
            return waiting.beside(self._reserve_more, nbytes)
        return slot

    def _reserve_more(self, nbytes: int) -> Slot:
        slot: Slot | NeedSegment | None = None
        while not isinstance(slot, Slot):
            # One thread makes the shared segment all are waiting for.
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
        """As `reserve`, of the segments that are there; None: none has room."""
        with self._lock:
            slot = self._arena.reserve(nbytes)
        return None if isinstance(slot, NeedSegment) else slot

    def _grow(self, need: NeedSegment) -> None:
        size = need.size
        if need.shared:
            wanted = self._shared_size()
            if self._first_size:
                wanted = min(wanted, max(self._first_size, self._arena.shared_bytes))
            size = max(size, wanted // size * size)
        pool = self._budget.pool_bytes
        if 0 < pool < size:
            raise TooLarge(
                f"memory of {size} bytes for a tensor is more than the whole pool of {pool} bytes"
                " (setting pool_bytes)"
            )
        if not self._budget.grant(size, _GRANT_TIMEOUT_S):
            if self.spare(size):
                self.trim(0.0, size)
                return  # who wants the memory looks again
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
            self._next_segment += 1  # never reused: a peer may still map an old one
            self._segments[number] = segment
            self._held += size
            self._arena.add_segment(number, size, need.shared, self._now(), segment.view)
        if self._mappings is not None:
            self._mappings.mapped(segment.address, size, writable=True)

    def read(self, at: Descriptor) -> memoryview:
        """The bytes that a descriptor of this arena names; whoever asks holds a lease on them."""
        return self._segments[at.segment].view[at.offset : at.offset + at.nbytes].toreadonly()

    def descriptor(self, slot: Slot) -> Descriptor:
        """What a peer needs to read the slot."""
        return Descriptor(slot.segment, slot.number, slot.generation, slot.offset, slot.nbytes)

    def seal_and_lease(self, slot: Slot, offset: int = 0, nbytes: int = -1) -> Descriptor:
        """Writing is over (I2); what a reader is told, who has the right to read from now on.

        With `nbytes`, it is told of that many bytes from `offset` on; they must lie within.
        """
        self._arena.seal_and_lease(slot)  # without the lock: nobody else knows the slot yet
        return Descriptor(
            slot.segment,
            slot.number,
            slot.generation,
            slot.offset + offset,
            slot.nbytes if nbytes < 0 else nbytes,
        )

    def lease(self, slot: Slot) -> None:
        """One more reader has the right to the slot."""
        with self._lock:
            self._arena.lease(slot)

    def release(self, number: int, generation: int) -> None:
        """A lease comes back.

        Raises:
            StaleDescriptor: there is no such lease.
        """
        if number < 0:
            self._release_foreign(number)
            return
        with self._lock:
            self._arena.release(number, generation, self._now())

    def _release_foreign(self, number: int) -> None:
        """What has a negative number lies in no arena; a subclass may know it."""
        raise StaleDescriptor(f"no lease on slot {number}")

    def reclaim(self, slot: Slot) -> None:
        """Take back a slot that no reader was given."""
        with self._lock:
            self._arena.reclaim(slot, self._now())

    def offers(
        self, segments: Iterable[int], known: set[int]
    ) -> tuple[list[SegmentOffer], list[int]]:
        """Offers and read-only fds of the segments a peer does not know; updates `known`.

        The caller closes the fds once they are sent.

        Raises:
            Unavailable: this process has no descriptor left; nothing is offered then.
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
        """Which of a peer's known segments were given back; takes them out of `known`."""
        gone = tuple(number for number in known if number not in self._segments)
        known.difference_update(gone)
        return gone

    def trim(self, idle_s: float = 0.0, nbytes: int | None = None) -> None:
        """Free segments nobody used for `idle_s` seconds, at most until `nbytes` are found."""
        with self._lock:
            numbers = self._arena.idle(self._now() - idle_s, nbytes)
            segments = [self._segments.pop(number) for number in numbers]
            freed = sum(segment.size for segment in segments)
            self._held -= freed
            self.drops += len(segments)
        for segment in segments:
            self._unmapping(segment)
            segment.free()
        if freed:
            self._budget.give_back(freed)

    @property
    def held_bytes(self) -> int:
        """Bytes of segments this process holds."""
        return self._held

    @property
    def may_shrink(self) -> bool:
        """Whether there is a segment that `trim` frees, now or once its slots are free."""
        return self._arena.may_shrink

    def stats(self) -> ArenaStats:
        with self._lock:
            return self._arena.stats()

    def rows(self, what: str) -> list[dict[str, Any]]:
        """Rows for `shmserve show segments` and `show slots`; none for anything else."""
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
        """Let go of everything; what peers still read lives until they are done."""
        with self._lock:
            segments = list(self._segments.values())
            self._segments.clear()
            self._arena.let_go()
        for segment in segments:
            self._unmapping(segment)
            segment.close()

    def _unmapping(self, segment: Segment) -> None:
        if self._mappings is not None:
            self._mappings.unmapping(segment.address)
