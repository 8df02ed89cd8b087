"""The memory that a frontend names to executors: its own slots, and outputs of other executors.

An output of one executor that is an input of another stays where it is: the frontend
passes the segment's read-only descriptor on, under a number of its own, and keeps the
slot leased until the second executor is done (I3). To everything that leases, releases
and offers, such a `Passed` output is a slot whose number is negative.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from shmserve.core.memory.slots import Slot, SlotState
from shmserve.errors import StaleDescriptor
from shmserve.protocol.control.data_messages import Descriptor, SegmentOffer
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.segment import Mapping

_FIRST_NUMBER = 1 << 40  # of segments that are not ours; our own never get there


class Passed:
    """Bytes of another process (or of a slot of ours) that are an input once more."""

    __slots__ = (
        "_let_go", "_mapping", "generation", "leases", "nbytes", "number", "offset", "segment",
        "state", "view",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        segment: int,
        offset: int,
        view: memoryview,
        let_go: Callable[[], None],
        mapping: Mapping | None,
    ) -> None:
        self.number = number
        self.generation = 0
        self.segment = segment
        self.offset = offset
        self.nbytes = len(view)
        self.view = view
        self.state = SlotState.SEALED
        self.leases = 0
        self._let_go = let_go
        self._mapping = mapping  # lives as long as we do: its descriptor may have to be sent

    def end(self) -> None:
        """Nobody reads it any more: its owner may have it back."""
        self.state = SlotState.FREE
        self.view = memoryview(b"")
        self._mapping = None
        self._let_go()


AnySlot = Slot | Passed


class RelayMemory(ArenaMemory):
    """An arena that also passes on what others have written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._passed: dict[int, Passed] = {}
        self._numbers = itertools.count(1)
        self._foreign: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._foreign_numbers = itertools.count(_FIRST_NUMBER)
        self._number_of: weakref.WeakKeyDictionary[Mapping, int] = weakref.WeakKeyDictionary()
        self._relay_lock = threading.Lock()

    # ------------------------------------------------------------ passing on

    def pass_on(self, mapping: Mapping, at: Descriptor, let_go: Callable[[], None]) -> Passed:
        """An output in the segment of an executor; `let_go` gives its lease back."""
        view = mapping.view[at.offset : at.offset + at.nbytes]
        segment = self._segment_number(mapping)
        return self._add(segment, at.offset, view, let_go, mapping)

    def pass_slot(self, slot: AnySlot, offset: int, nbytes: int) -> Passed:
        """A part of an input (ours, or one that was passed on) that is one once more."""
        view = self.view(slot).toreadonly()[offset : offset + nbytes]
        self.lease(slot)
        number, generation = slot.number, slot.generation
        mapping = slot._mapping if isinstance(slot, Passed) else None
        return self._add(
            slot.segment,
            slot.offset + offset,
            view,
            lambda: self.release(number, generation),
            mapping,
        )

    def _add(
        self,
        segment: int,
        offset: int,
        view: memoryview,
        let_go: Callable[[], None],
        mapping: Mapping | None,
    ) -> Passed:
        with self._relay_lock:
            number = -next(self._numbers)
            passed = Passed(number, segment, offset, view, let_go, mapping)
            self._passed[number] = passed
        return passed

    def _segment_number(self, mapping: Mapping) -> int:
        with self._relay_lock:
            number = self._number_of.get(mapping)
            if number is None:
                number = next(self._foreign_numbers)
                self._number_of[mapping] = number
                self._foreign[number] = mapping
                weakref.finalize(mapping, self._mapping_gone)
        return number

    def _mapping_gone(self) -> None:
        self.drops += 1  # so that every lane looks what it still knows

    # ------------------------------------------- what calls do with any slot

    def view(self, slot: AnySlot) -> memoryview:
        return slot.view if isinstance(slot, Passed) else super().view(slot)

    def descriptor(self, slot: AnySlot) -> Descriptor:
        if isinstance(slot, Passed):
            return Descriptor(slot.segment, slot.number, 0, slot.offset, slot.nbytes)
        return super().descriptor(slot)

    def lease(self, slot: AnySlot) -> None:
        if not isinstance(slot, Passed):
            super().lease(slot)
            return
        with self._relay_lock:
            if slot.state is SlotState.FREE:
                raise StaleDescriptor("an output was passed on after its end")
            slot.state = SlotState.LEASED
            slot.leases += 1

    def release(self, number: int, generation: int) -> None:
        if number >= 0:
            super().release(number, generation)
            return
        with self._relay_lock:
            passed = self._passed.get(number)
            if passed is None or passed.state is not SlotState.LEASED:
                raise StaleDescriptor(f"no lease on passed output {number}")
            passed.leases -= 1
            if passed.leases:
                return
            del self._passed[number]
        passed.end()

    def reclaim(self, slot: AnySlot) -> None:
        if not isinstance(slot, Passed):
            super().reclaim(slot)
            return
        with self._relay_lock:
            if self._passed.pop(slot.number, None) is None:
                raise StaleDescriptor("a passed output was taken back twice")
        slot.end()

    # --------------------------------------------------------------- offering

    def offers(
        self, segments: Iterable[int], known: set[int]
    ) -> tuple[list[SegmentOffer], list[int]]:
        numbers = list(segments)
        offers, fds = super().offers([n for n in numbers if n < _FIRST_NUMBER], known)
        for number in numbers:
            if number >= _FIRST_NUMBER and number not in known:
                mapping = self._foreign[number]
                fds.append(os.dup(mapping.fd))
                offers.append(SegmentOffer(number, mapping.size))
                known.add(number)
        return offers, fds

    def dropped(self, known: set[int]) -> tuple[int, ...]:
        live = {number for number in known if number in self._foreign}
        own = known - live
        gone = super().dropped(own)
        known.intersection_update(own | live)
        return gone

    @property
    def passed(self) -> int:
        """How many outputs are on their way from executor to executor."""
        return len(self._passed)
