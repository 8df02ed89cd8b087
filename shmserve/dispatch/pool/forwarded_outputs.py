"""Forwarded outputs: memory that a frontend offers to executors, both own slots and outputs of
other executors.

An output of an executor that is an input of another executor stays in place. The frontend passes
on the segment's read-only descriptor, under a number of its own, and keeps the slot leased until
the second executor is done (I3). For leasing, releasing and offering, a `ForwardedOutput` is a
slot with a negative number. So tensors between the steps of an ensemble never enter a frontend's
arena.

Each step that takes the output has a lease. The ensemble's call has a lease until the last of
these steps has begun. The lease on the executor's slot moves to the `ForwardedOutput`, and does
not end with the call that produced the output. An output that aliases an input is passed on as
that input. Executors need not know: they map segments read-only, and check bounds against the
announced size (I11).
"""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from msgspec import field

from shmserve.core.memory.slots import NO_BYTES, Slot, SlotState
from shmserve.errors import StaleDescriptor, Unavailable
from shmserve.protocol.control.data_messages import Descriptor, SegmentOffer
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.segment import Mapping
from shmserve.transport.channel import close_all

_FIRST_NUMBER = 1 << 40  # of foreign segments; our own numbers stay far below


class ForwardedOutput(Slot, eq=False, kw_only=True):
    """Bytes of another process, or of a slot of ours, used as an input.

    Args:
        number: negative, because the slot is in no arena of ours.
        segment: number of our segment, or our number for a foreign segment.
        let_go: gives back the lease that keeps the bytes.
        mapping: the foreign segment, kept while the output lives, because its descriptor may have
            to be sent.
    """

    let_go: Callable[[], None]
    mapping: Mapping | None

    def end(self) -> None:
        """Give the bytes back to the owner, after the last lease."""
        self.state = SlotState.FREE
        self.view = NO_BYTES
        self.mapping = None
        self.let_go()


class ForwardingMemory(ArenaMemory, eq=False):
    """An arena that can also pass on outputs of other processes."""

    _forwarded: dict[int, ForwardedOutput] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _foreign: weakref.WeakValueDictionary[int, Mapping] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _foreign_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST_NUMBER))
    _number_of: weakref.WeakKeyDictionary[Mapping, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _forwarding: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------ passing on

    def pass_on(
        self, mapping: Mapping, at: Descriptor, let_go: Callable[[], None]
    ) -> ForwardedOutput:
        """Pass on an output in an executor's segment. `let_go` gives the output's lease back."""
        view = mapping.view[at.offset : at.offset + at.nbytes]
        segment = self._segment_number(mapping)
        return self._add(segment, at.offset, view, let_go, mapping)

    def pass_slot(self, slot: Slot, offset: int, nbytes: int) -> ForwardedOutput:
        """Pass on a part of an input, which is ours or was passed on before, as another input."""
        view = slot.view.toreadonly()[offset : offset + nbytes]
        self.lease(slot)
        number, generation = slot.number, slot.generation
        return self._add(
            slot.segment,
            slot.offset + offset,
            view,
            lambda: self.release(number, generation),
            slot.mapping if isinstance(slot, ForwardedOutput) else None,
        )

    def _add(
        self,
        segment: int,
        offset: int,
        view: memoryview,
        let_go: Callable[[], None],
        mapping: Mapping | None,
    ) -> ForwardedOutput:
        with self._forwarding:
            number = -next(self._numbers)
            nbytes = len(view)
            output = ForwardedOutput(
                number=number,
                state=SlotState.SEALED,
                segment=segment,
                offset=offset,
                size=nbytes,
                nbytes=nbytes,
                view=view,
                let_go=let_go,
                mapping=mapping,
            )
            self._forwarded[number] = output
        return output

    def _segment_number(self, mapping: Mapping) -> int:
        with self._forwarding:
            number = self._number_of.get(mapping)
            if number is None:
                number = next(self._foreign_numbers)
                self._number_of[mapping] = number
                self._foreign[number] = mapping
                weakref.finalize(mapping, self._mapping_gone)
        return number

    def _mapping_gone(self) -> None:
        self.drops += 1  # makes every connection clean up its known segments

    # ------------------------------------------- what calls do with any slot

    def lease(self, slot: Slot) -> None:
        if slot.number >= 0:
            super().lease(slot)
            return
        with self._forwarding:
            if slot.state is SlotState.FREE:
                raise StaleDescriptor("an output was passed on after its end")
            slot.state = SlotState.LEASED
            slot.leases += 1

    def _release_foreign(self, number: int) -> None:
        with self._forwarding:
            output = self._forwarded.get(number)
            if output is None or output.state is not SlotState.LEASED:
                raise StaleDescriptor(f"no lease on forwarded output {number}")
            output.leases -= 1
            if output.leases > 0:
                return
            del self._forwarded[number]
        output.end()

    # --------------------------------------------------------------- offering

    def offers(
        self, segments: Iterable[int], known: set[int]
    ) -> tuple[list[SegmentOffer], list[int]]:
        numbers = list(segments)
        offers, fds = super().offers([n for n in numbers if n < _FIRST_NUMBER], known)
        for number in numbers:
            if number >= _FIRST_NUMBER and number not in known:
                mapping = self._foreign[number]
                try:
                    fds.append(os.dup(mapping.fd))
                except OSError as ex:
                    close_all(fds)
                    known.difference_update(offer.segment for offer in offers)
                    raise Unavailable("too many open files") from ex
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
    def forwarded(self) -> int:
        """Number of outputs being passed on between executors."""
        return len(self._forwarded)
