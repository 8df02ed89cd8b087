"""Sequence queue: slots, backlog and next batch for the sequences of one model instance.

Pure; the clock is an argument. Decides as Triton's sequence batcher: requests of one sequence run
one after another in order of arrival, requests of several sequences run together. A sequence
begins with a request marked as start, and keeps its slot until a request marked as end has run. A
sequence also ends if no request has come for the idle limit. A sequence which finds no free slot
waits in the backlog. Unlike Triton's, the batcher shares slots between callers (`sequence_slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol

from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn
from shmserve.core.scheduling.sequence_names import SequenceId
from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_slots import LiveSequence, SequenceSlots, Step


class Listener(Protocol):
    """Receiver of the queue's notices about sequences."""

    def began(self, sequence: SequenceId) -> None: ...

    def ended(self, sequence: SequenceId) -> None: ...

    def gave_way(self, sequence: SequenceId) -> None:
        """Handle an idle sequence that ends next, because another caller's sequence needs the
        slot."""
        ...

    def gave_up(self, items: list[Any]) -> None:
        """Handle all requests of a sequence that waited longer for a slot than one of its requests
        may."""
        ...


def _ends_ns(step: Step[Key, Item], sequence: LiveSequence[Key, Item]) -> int:
    """Return the time from which a waiting request must not run any more."""
    expires_ns = step.expires_ns if sequence.slot is None else 0
    return min(step.deadline_ns or NEVER_NS, expires_ns or NEVER_NS)


class SequenceQueue(Generic[Key, Item]):
    """Scheduler (`scheduler.Scheduler`) of requests by sequence. `waiting`: sequence of each
    waiting request, by key. `next_end_ns`: no deadline or queue limit of a waiting request passes
    before this time."""

    def __init__(self, policy: SequencePolicy, listener: Listener) -> None:
        self.next_end_ns = NEVER_NS
        self._policy = policy
        self._listener = listener
        self._live: dict[SequenceId, LiveSequence[Key, Item]] = {}
        self._slots: SequenceSlots[Key, Item] = SequenceSlots(policy)
        self.waiting: dict[Key, LiveSequence[Key, Item]] = {}
        self._orphans: list[Item] = []  # requests whose sequence lost its start request

    # ------------------------------------------------------------------ intake

    def knows(self, id: SequenceId) -> bool:
        """Return True if a request without the start mark can join this sequence."""
        sequence = self._live.get(id)
        return sequence is not None and sequence.is_open

    def has_room_for(self, caller: int) -> bool:
        """Return True if a new sequence of this caller can begin, or wait for a slot."""
        return self._slots.has_room_for(self._policy.turn_of(caller))

    def push(self, id: SequenceId, step: Step[Key, Item]) -> None:
        """Append a request with the start mark, or a request of a known sequence (`knows`). A
        start request for an existing sequence ends the old sequence; the new one follows in the
        same slot."""
        sequence = self._live.get(id)
        if sequence is None:
            sequence = self._live[id] = LiveSequence(id, self._policy.turn_of(step.caller))
            self._slots.add(sequence)
            self._listener.began(id)
            self._slots.fill()
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
        idle_at_ns = min(self._end_idle(now_ns, hurry), self._give_way(now_ns))
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
            for sequence in list(self._slots.waiting()):
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

    def _give_up(self, sequence: LiveSequence[Key, Item]) -> None:
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
        for sequence in [each for each in self._slots.slots if each is not None and each.running]:
            step, sequence.running, sequence.quiet_ns = sequence.running, None, now_ns
            if step is not None and step.key in again:
                step = again[step.key]
                sequence.waiting.appendleft(step)
                self.waiting[step.key] = sequence
                self.next_end_ns = min(self.next_end_ns, step.deadline_ns or NEVER_NS)
                continue
            if step is not None and step.end and sequence.waiting and self._slots.backlog:
                self._slots.remove(sequence)  # the next sequence of this id queues as a new one
                self._slots.add(sequence)
                ends_ns = (_ends_ns(step, sequence) for step in sequence.waiting)
                self.next_end_ns = min(self.next_end_ns, *ends_ns)
            self._end_if_over(sequence)
        self._slots.fill()

    def slot_of(self, id: SequenceId) -> int:
        """Return the slot of a sequence with a running request."""
        slot = self._live[id].slot
        assert slot is not None
        return slot

    @property
    def free_slots(self) -> int:
        return max(0, self._policy.slots - len(self._live))

    def _end_idle(self, now_ns: int, hurry: bool) -> int:
        """End idle sequences; return the time at which the next one would end."""
        soonest = NEVER_NS
        for sequence in self._slots.slots:
            if sequence is None or not sequence.is_idle:
                continue
            ends_ns = sequence.quiet_ns + self._policy.idle_ns
            if now_ns >= ends_ns or (hurry and self._slots.backlog):
                self._end(sequence)
            else:
                soonest = min(soonest, ends_ns)
        return soonest

    def _give_way(self, now_ns: int) -> int:
        """End idle sequences whose slots other callers' sequences need; return the time at which
        the next one would end."""
        while True:
            sequence, at_ns = self._slots.next_to_yield(now_ns)
            if sequence is None:
                return at_ns
            self._listener.gave_way(sequence.id)
            self._end(sequence)

    def _choose(self, now_ns: int, hurry: bool) -> tuple[list[Step[Key, Item]], int]:
        """Return the batch to run now, or an empty batch and the time at which a batch is due
        without further arrivals."""
        policy = self._policy
        slots = self._slots.slots
        heads = [each.waiting[0] for each in slots if each is not None and each.waiting]
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

    def _end_if_over(self, sequence: LiveSequence[Key, Item]) -> None:
        if not (sequence.waiting or sequence.running or sequence.is_open):
            self._end(sequence)

    def _end(self, sequence: LiveSequence[Key, Item]) -> None:
        self._slots.remove(sequence)
        del self._live[sequence.id]
        self._listener.ended(sequence.id)
        self._slots.fill()
