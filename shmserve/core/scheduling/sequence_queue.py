"""Sequence queue: slots, backlog and next batch for the sequences of one model instance.

Pure; the clock is an argument. Decides as Triton's sequence batcher: requests of one sequence run
one after another in order of arrival, requests of several sequences run together. A sequence
begins with a request marked as start, and keeps its slot until a request marked as end has run. A
sequence also ends if no request has come for the idle limit. A sequence which finds no free slot
waits in the backlog.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol

from shmserve.core.scheduling.batch_queue import Waiting
from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn
from shmserve.core.scheduling.sequence_policy import SequencePolicy

SequenceId = int | str  # 5 and "5" are two sequences


class Listener(Protocol):
    """Receiver of the queue's notices about sequences."""

    def began(self, sequence: SequenceId) -> None: ...

    def ended(self, sequence: SequenceId) -> None: ...

    def gave_up(self, items: list[Any]) -> None:
        """Handle all requests of a sequence that waited longer for a slot than one of its requests
        may."""
        ...


class Step(Waiting[Key, Item], Generic[Key, Item]):
    """Request of a sequence. `start` and `end` mark the sequence's first and last request;
    `expires_ns` counts only while the sequence has no slot."""

    start: bool = False
    end: bool = False


class _Sequence(Generic[Key, Item]):
    """Sequence with a slot, or in the backlog.

    Attributes:
        waiting: waiting requests, in order. The first can always run: it begins the sequence, or
            continues one that has begun.
        is_open: True if requests may follow the last one.
        running: request in the model now.
        quiet_ns: time since when the sequence has been idle.
    """

    def __init__(self, id: SequenceId) -> None:
        self.id = id
        self.slot: int | None = None
        self.waiting: deque[Step[Key, Item]] = deque()
        self.is_open = False
        self.running: Step[Key, Item] | None = None
        self.quiet_ns = 0

    def leave(self, slots: list[_Sequence[Key, Item] | None]) -> bool:
        """Give the slot back. Return False if the sequence had none."""
        if self.slot is None:
            return False
        slots[self.slot] = None
        self.slot = None
        return True

    def withdraw(self, key: Key) -> tuple[Step[Key, Item], list[Step[Key, Item]]]:
        """Remove a request; a removed start request takes the requests behind it along, up to the
        next start. Return the removed request and these orphans."""
        waiting = self.waiting
        index = next(index for index, step in enumerate(waiting) if step.key == key)
        step = waiting[index]
        del waiting[index]
        self.quiet_ns = max(self.quiet_ns, step.arrived_ns)
        orphans = []
        if step.start:
            while index < len(waiting) and not waiting[index].start:
                orphans.append(waiting[index])
                del waiting[index]
            if index == len(waiting):
                self.is_open = False
        return step, orphans


def _ends_ns(step: Step[Key, Item], sequence: _Sequence[Key, Item]) -> int:
    """Return the time from which a waiting request must not run any more."""
    expires_ns = step.expires_ns if sequence.slot is None else 0
    return min(step.deadline_ns or NEVER_NS, expires_ns or NEVER_NS)


class SequenceQueue(Generic[Key, Item]):
    """Scheduler (`scheduler.Scheduler`) of requests by sequence. `waiting`: sequence of each
    waiting request, by key. `next_end_ns`: no deadline or queue limit of a waiting request passes
    before this time. `backlog`: sequences without a slot, in order."""

    def __init__(self, policy: SequencePolicy, listener: Listener) -> None:
        self.next_end_ns = NEVER_NS
        self.backlog: deque[_Sequence[Key, Item]] = deque()
        self._policy = policy
        self._listener = listener
        self._live: dict[SequenceId, _Sequence[Key, Item]] = {}
        self._slots: list[_Sequence[Key, Item] | None] = [None] * policy.slots
        self.waiting: dict[Key, _Sequence[Key, Item]] = {}
        self._orphans: list[Item] = []  # requests whose sequence lost its start request

    # ------------------------------------------------------------------ intake

    def knows(self, id: SequenceId) -> bool:
        """Return True if a request without the start mark can join this sequence."""
        sequence = self._live.get(id)
        return sequence is not None and sequence.is_open

    def has_room_for(self, id: SequenceId) -> bool:
        """Return True if this sequence can begin, or begin anew if it exists."""
        return id in self._live or len(self._live) < self._policy.max_sequences

    def push(self, id: SequenceId, step: Step[Key, Item]) -> None:
        """Append a request with the start mark, or a request of a known sequence (`knows`). A
        start request for an existing sequence ends the old sequence; the new one follows in the
        same slot."""
        sequence = self._live.get(id)
        if sequence is None:
            sequence = self._live[id] = _Sequence(id)
            self.backlog.append(sequence)
            self._listener.began(id)
            self._fill_slots()
        sequence.waiting.append(step)
        sequence.is_open = not step.end
        self.waiting[step.key] = sequence
        self.next_end_ns = min(self.next_end_ns, _ends_ns(step, sequence))

    def cancel(self, key: Key) -> Item | None:
        """Remove and return a waiting request; return None if the key is not waiting. If the
        request begins its sequence, the requests behind it have no sequence any more: the next
        turn rejects them."""
        sequence = self.waiting.pop(key, None)
        if sequence is None:
            return None
        step, orphans = sequence.withdraw(key)
        for orphan in orphans:
            del self.waiting[orphan.key]
            self._orphans.append(orphan.item)
            self.next_end_ns = 0  # report the orphans at the next turn
        self._end_if_over(sequence)
        return step.item

    # -------------------------------------------------------------------- turns

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Return the batch to run now, and the late and rejected requests. `hurry`: no further
        request will come, so neither a batch nor a slot waits. Without `may_run` the batch
        stays in the queue."""
        late, orphans = self.expire(now_ns)
        idle_at_ns = self._end_idle(now_ns, hurry)
        chosen, at_ns = self._choose(now_ns, hurry)
        batch = chosen if may_run else []
        for step in batch:
            sequence = self.waiting.pop(step.key)
            sequence.running = sequence.waiting.popleft()
        soonest = min(at_ns, idle_at_ns, self.next_end_ns)
        wait_ns = None if soonest == NEVER_NS else max(0, soonest - now_ns)
        return Turn([step.item for step in batch], late, orphans, wait_ns, bool(chosen))

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Remove and return late requests, and orphans: requests whose sequence has lost its start
        request."""
        late: list[Item] = []
        if now_ns >= self.next_end_ns:
            for sequence in list(self.backlog):  # sequences that wait for a slot
                if any(0 < step.expires_ns <= now_ns for step in sequence.waiting):
                    self._give_up(sequence)
            for step in [step for each in self._live.values() for step in each.waiting]:
                is_late = step.deadline_ns and now_ns >= step.deadline_ns
                if is_late and self.cancel(step.key) is not None:
                    late.append(step.item)
            ends_ns = [
                _ends_ns(step, each) for each in self._live.values() for step in each.waiting
            ]
            self.next_end_ns = min(ends_ns, default=NEVER_NS)
        orphans, self._orphans = self._orphans, []
        return late, orphans

    def _give_up(self, sequence: _Sequence[Key, Item]) -> None:
        for step in sequence.waiting:
            del self.waiting[step.key]
        self._listener.gave_up([step.item for step in sequence.waiting])
        sequence.waiting.clear()
        self._end(sequence)

    def done(
        self, now_ns: int, again: Mapping[Key, Step[Key, Item]] = MappingProxyType({})
    ) -> None:
        """End the run of the batch. `again`: requests of the batch to run once more, in their new
        form. Such a request keeps its slot. If a batch cannot take all sequences, the request's
        turn comes after the turns of the other sequences."""
        for sequence in [each for each in self._slots if each is not None and each.running]:
            step, sequence.running, sequence.quiet_ns = sequence.running, None, now_ns
            if step is not None and step.key in again:
                step = again[step.key]
                sequence.waiting.appendleft(step)
                self.waiting[step.key] = sequence
                self.next_end_ns = min(self.next_end_ns, step.deadline_ns or NEVER_NS)
                continue
            if step is not None and step.end and sequence.waiting and self.backlog:
                self._free(sequence)  # the next sequence of this id queues behind the backlog
                self.backlog.append(sequence)
                ends_ns = (_ends_ns(step, sequence) for step in sequence.waiting)
                self.next_end_ns = min(self.next_end_ns, *ends_ns)
            self._end_if_over(sequence)
        self._fill_slots()

    def slot_of(self, id: SequenceId) -> int:
        """Return the slot of a sequence with a running request."""
        slot = self._live[id].slot
        assert slot is not None
        return slot

    @property
    def free_slots(self) -> int:
        return max(0, len(self._slots) - len(self._live))

    def _end_idle(self, now_ns: int, hurry: bool) -> int:
        """End idle sequences; return the time at which the next one would end."""
        soonest = NEVER_NS
        for sequence in self._slots:
            if sequence is None or sequence.waiting or sequence.running:
                continue
            ends_ns = sequence.quiet_ns + self._policy.idle_ns
            if now_ns >= ends_ns or (hurry and self.backlog):
                self._end(sequence)
            else:
                soonest = min(soonest, ends_ns)
        self._fill_slots()
        return soonest

    def _choose(self, now_ns: int, hurry: bool) -> tuple[list[Step[Key, Item]], int]:
        """Return the batch to run now, or an empty batch and the time at which a batch is due
        without further arrivals."""
        policy = self._policy
        heads = [each.waiting[0] for each in self._slots if each is not None and each.waiting]
        if not heads:
            return [], NEVER_NS
        oldest = min(heads, key=lambda step: step.arrived_ns)
        agreeing = [step for step in heads if step.kind == oldest.kind]
        if not policy.by_slot:
            agreeing.sort(key=lambda step: step.arrived_ns)
        batch = agreeing[: policy.max_size]
        due_ns = oldest.arrived_ns + policy.max_delay_ns
        if hurry or (policy.max_delay_ns and now_ns >= due_ns):
            return batch, NEVER_NS
        size = policy.size_now(len(batch))
        if size or not policy.max_delay_ns:
            return batch[: size or len(batch)], NEVER_NS
        return [], due_ns

    # -------------------------------------------------------------------- slots

    def _fill_slots(self) -> None:
        """Give free slots to the backlog, lowest slot first."""
        while self.backlog and None in self._slots:
            sequence = self.backlog.popleft()
            sequence.slot = self._slots.index(None)  # the lowest free slot
            self._slots[sequence.slot] = sequence

    def _free(self, sequence: _Sequence[Key, Item]) -> None:
        if not sequence.leave(self._slots):
            self.backlog.remove(sequence)

    def _end_if_over(self, sequence: _Sequence[Key, Item]) -> None:
        if not (sequence.waiting or sequence.running or sequence.is_open):
            self._end(sequence)

    def _end(self, sequence: _Sequence[Key, Item]) -> None:
        self._free(sequence)
        del self._live[sequence.id]
        self._listener.ended(sequence.id)
        self._fill_slots()
