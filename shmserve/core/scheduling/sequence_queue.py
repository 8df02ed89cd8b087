"""The sequences of one model instance: who has a slot, who waits for one, and what runs next.

Pure; the clock is an argument. As Triton's sequence batcher decides: requests of one sequence run
one after another in the order they came, those of several together. A sequence begins with a
request that is marked so, has its slot until one that is marked as its end has run, and has ended
as well when nothing has come for too long. Who finds no slot free waits until one is.
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
    """Who is told which sequences there are."""

    def began(self, sequence: SequenceId) -> None: ...

    def ended(self, sequence: SequenceId) -> None: ...

    def gave_up(self, items: list[Any]) -> None:
        """All requests of a sequence, which has waited for a slot longer than one of them may."""
        ...


class Step(Waiting[Key, Item], Generic[Key, Item]):
    """A request of a sequence; `start` and `end`: that it is the first one, and the last.
    `expires_ns` counts while its sequence has no slot."""

    start: bool = False
    end: bool = False


class _Sequence(Generic[Key, Item]):
    """One that has begun, or is waiting for its slot to begin.

    Attributes:
        waiting: in order. Whatever is first can run: it begins, or goes on with what has begun.
        is_open: requests may follow the last one.
        running: the one the model has now.
        quiet_ns: since when it has had nothing to do.
    """

    def __init__(self, id: SequenceId) -> None:
        self.id = id
        self.slot: int | None = None
        self.waiting: deque[Step[Key, Item]] = deque()
        self.is_open = False
        self.running: Step[Key, Item] | None = None
        self.quiet_ns = 0

    def enter(self, slots: list[_Sequence[Key, Item] | None]) -> None:
        """Take the lowest free slot."""
        self.slot = slots.index(None)
        slots[self.slot] = self

    def leave(self, slots: list[_Sequence[Key, Item] | None]) -> bool:
        """Give the slot back. Return False if the sequence had none."""
        if self.slot is None:
            return False
        slots[self.slot] = None
        self.slot = None
        return True

    def append(self, step: Step[Key, Item]) -> None:
        self.waiting.append(step)
        self.is_open = not step.end

    def withdraw(self, key: Key) -> tuple[Step[Key, Item], list[Step[Key, Item]]]:
        """Take a request out; without the first of a sequence those behind it go, too."""
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

    def withdraw_all(self) -> list[Step[Key, Item]]:
        """Take all requests out that wait; none may follow."""
        steps = list(self.waiting)
        self.waiting.clear()
        self.is_open = False
        return steps

    def run_next(self) -> None:
        """Hand the first request to the model."""
        self.running = self.waiting.popleft()

    def end_run(self, now_ns: int) -> Step[Key, Item] | None:
        """The model is done with the request that ran; return it."""
        step, self.running = self.running, None
        self.quiet_ns = now_ns
        return step

    def has_expired(self, now_ns: int) -> bool:
        """Whether one of its requests has waited too long; it matters while it has no slot."""
        return any(step.expires_ns and now_ns >= step.expires_ns for step in self.waiting)


def _ends_ns(step: Step[Key, Item], sequence: _Sequence[Key, Item]) -> int:
    """From when on a request that waits is not to run any more."""
    expires_ns = step.expires_ns if sequence.slot is None else 0
    return min(step.deadline_ns or NEVER_NS, expires_ns or NEVER_NS)


class SequenceQueue(Generic[Key, Item]):
    """A scheduler (`scheduler.Scheduler`) of requests by their sequences.

    Attributes:
        waiting: the sequence of each waiting request, by key.
        next_end_ns: nothing is past its deadline, or to be rejected, before.
        backlog: sequences that wait for a slot, in order.
    """

    def __init__(self, policy: SequencePolicy, listener: Listener) -> None:
        self.next_end_ns = NEVER_NS
        self.backlog: deque[_Sequence[Key, Item]] = deque()
        self._policy = policy
        self._listener = listener
        self._live: dict[SequenceId, _Sequence[Key, Item]] = {}
        self._slots: list[_Sequence[Key, Item] | None] = [None] * policy.slots
        self.waiting: dict[Key, _Sequence[Key, Item]] = {}
        self._orphans: list[Item] = []  # what began their sequence never ran

    # ------------------------------------------------------------------ intake

    def knows(self, id: SequenceId) -> bool:
        """Whether a request that begins nothing can be a part of this sequence."""
        sequence = self._live.get(id)
        return sequence is not None and sequence.is_open

    def has_room_for(self, id: SequenceId) -> bool:
        """Whether this sequence can begin, anew if it is here."""
        return id in self._live or len(self._live) < self._policy.max_sequences

    def push(self, id: SequenceId, step: Step[Key, Item]) -> None:
        """Append a request that begins its sequence, or one of a sequence it `knows`. One that
        begins a sequence which is here ends that one, in the same slot."""
        sequence = self._live.get(id)
        if sequence is None:
            sequence = self._live[id] = _Sequence(id)
            self.backlog.append(sequence)
            self._listener.began(id)
            self._fill_slots()
        sequence.append(step)
        self.waiting[step.key] = sequence
        self.next_end_ns = min(self.next_end_ns, _ends_ns(step, sequence))

    def cancel(self, key: Key) -> Item | None:
        """Take a request out that has not started; None if it is not here. Without the one that
        begins it there is no sequence: those behind are told so at the next turn."""
        sequence = self.waiting.pop(key, None)
        if sequence is None:
            return None
        step, orphans = sequence.withdraw(key)
        for orphan in orphans:
            del self.waiting[orphan.key]
            self._orphans.append(orphan.item)
            self.next_end_ns = 0  # it is to be told now
        self._end_if_over(sequence)
        return step.item

    # -------------------------------------------------------------------- turns

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """The next batch if it is to run now, and what never will. `hurry`: no more will come,
        so neither a batch nor a slot is kept for it. Unless it `may_run` it stays."""
        late, orphans = self.expire(now_ns)
        idle_at_ns = self._end_idle(now_ns, hurry)
        chosen, at_ns = self._choose(now_ns, hurry)
        batch = chosen if may_run else []
        for step in batch:
            sequence = self.waiting.pop(step.key)
            sequence.run_next()
        soonest = min(at_ns, idle_at_ns, self.next_end_ns)
        wait_ns = None if soonest == NEVER_NS else max(0, soonest - now_ns)
        return Turn([step.item for step in batch], late, orphans, wait_ns, bool(chosen))

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Take out what is past its deadline, and what has lost the request that began its
        sequence."""
        late: list[Item] = []
        if now_ns >= self.next_end_ns:
            for sequence in [each for each in self.backlog if each.has_expired(now_ns)]:
                self._give_up(sequence)
            for step in [step for each in self._live.values() for step in each.waiting]:
                is_late = step.deadline_ns and now_ns >= step.deadline_ns
                if is_late and self.cancel(step.key) is not None:
                    late.append(step.item)
            left = [_ends_ns(step, each) for each in self._live.values() for step in each.waiting]
            self.next_end_ns = min(left, default=NEVER_NS)
        orphans, self._orphans = self._orphans, []
        return late, orphans

    def _give_up(self, sequence: _Sequence[Key, Item]) -> None:
        steps = sequence.withdraw_all()
        for step in steps:
            del self.waiting[step.key]
        self._listener.gave_up([step.item for step in steps])
        self._end(sequence)

    def done(
        self, now_ns: int, again: Mapping[Key, Step[Key, Item]] = MappingProxyType({})
    ) -> None:
        """The batch has run. `again`: those of it that run once more, and as what. Each keeps its
        slot; where there are more than a batch takes, its turn comes behind theirs."""
        for sequence in [each for each in self._slots if each is not None and each.running]:
            step = sequence.end_run(now_ns)
            if step is not None and step.key in again:
                step = again[step.key]
                sequence.waiting.appendleft(step)
                self.waiting[step.key] = sequence
                self.next_end_ns = min(self.next_end_ns, step.deadline_ns or NEVER_NS)
                continue
            if step is not None and step.end and sequence.waiting and self.backlog:
                self._free(sequence)  # its successor takes its turn behind those that wait
                self.backlog.append(sequence)
                ends_ns = (_ends_ns(step, sequence) for step in sequence.waiting)
                self.next_end_ns = min(self.next_end_ns, *ends_ns)
            self._end_if_over(sequence)
        self._fill_slots()

    def slot_of(self, id: SequenceId) -> int:
        """The slot of a sequence whose request runs."""
        slot = self._live[id].slot
        assert slot is not None
        return slot

    @property
    def free_slots(self) -> int:
        return max(0, len(self._slots) - len(self._live))

    def _end_idle(self, now_ns: int, hurry: bool) -> int:
        """End what nothing has come for; when the next one would be."""
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
        """The batch to run now; empty: when one will be due without another arrival."""
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
        """Give those that wait the slots that are free, the lowest first."""
        while self.backlog and None in self._slots:
            self.backlog.popleft().enter(self._slots)

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
