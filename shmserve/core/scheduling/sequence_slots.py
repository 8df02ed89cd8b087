"""Sequence slots: slots of one instance, and the sequences waiting for a slot, by caller. Pure;
the clock is an argument.

A free slot goes to the waiting caller with the fewest slots; callers with equally many take turns.
With a single caller, sequences get slots in order of arrival, and a sequence keeps the slot until
the sequence ends or has been idle for the idle limit.

With several callers, an idle sequence (no request waits or runs) may have to give way sooner. The
sequence's caller must hold at least two slots more than a waiting caller; otherwise two sequences
could displace each other in turn. A sequence gives way after `SequencePolicy.patience_ns` without a
request. Beyond the caller's share of the slots (`max_caller_share`), an idle sequence also gives
way once the other caller has waited for `patience_ns`, however short the sequence's pause.
So keep-alive requests cannot hold more slots than the share.

Invariants (tests/property/test_sequence_properties.py, test_sequence_slots_properties.py):
- no two sequences have the same slot, and no slot is free while a sequence waits;
- a sequence gives way only while idle, to another caller, and the sequence's caller then holds at
  least as many slots as the other caller;
- if a caller waits without a slot, and another caller has two, an idle sequence of the latter
  gives way after `patience_ns` of silence;
- while all callers wait, each gets equally many slots as sequences end;
- with a single caller nothing gives way, and sequences enter in order of arrival.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from math import ceil
from typing import Generic

from shmserve.core.scheduling.batch_queue import Waiting
from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key
from shmserve.core.scheduling.sequence_names import SequenceId
from shmserve.core.scheduling.sequence_policy import SequencePolicy


class Step(Waiting[Key, Item], Generic[Key, Item]):
    """Request of a sequence. `start` and `end` mark the sequence's first and last request;
    `expires_ns` counts only while the sequence has no slot."""

    start: bool = False
    end: bool = False


class LiveSequence(Generic[Key, Item]):
    """Sequence with a slot, or waiting for a slot.

    Attributes:
        caller: caller whose share the sequence counts against.
        slot: number of the sequence's slot; None without one.
        waiting: waiting requests, in order. The first can always run: it begins the sequence, or
            continues one that has begun.
        is_open: True if requests may follow the last one.
        running: request in the model now.
        quiet_ns: time since when the sequence has been idle.
    """

    def __init__(self, id: SequenceId, caller: int) -> None:
        self.id = id
        self.caller = caller
        self.slot: int | None = None
        self.waiting: deque[Step[Key, Item]] = deque()
        self.is_open = False
        self.running: Step[Key, Item] | None = None
        self.quiet_ns = 0

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and self.running is None

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


class SequenceSlots(Generic[Key, Item]):
    """Slots, by number, and waiting sequences, in a line for each caller. `slots`: sequence in
    each slot, or None; read-only. `backlog`: number of waiting sequences."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.slots: list[LiveSequence[Key, Item] | None] = [None] * policy.slots
        self.backlog = 0
        self._held: Counter[int] = Counter()  # caller -> slots
        # caller -> waiting sequences; among callers with equally many slots, the next first
        self._lines: OrderedDict[int, deque[LiveSequence[Key, Item]]] = OrderedDict()
        self._patience_ns = policy.patience_ns
        self._share = ceil(policy.slots * policy.caller_share)
        self._max_waiting = policy.max_waiting
        self._waiting_share = ceil(policy.max_waiting * policy.caller_share)

    def has_room_for(self, caller: int) -> bool:
        """Return True if another sequence of this caller may enter or wait."""
        if None in self.slots:
            return True
        has = len(self._lines.get(caller, ()))
        return self.backlog < self._max_waiting and has < self._waiting_share

    def add(self, sequence: LiveSequence[Key, Item]) -> None:
        """Append a sequence to the line of the sequence's caller."""
        self._lines.setdefault(sequence.caller, deque()).append(sequence)
        self.backlog += 1

    def remove(self, sequence: LiveSequence[Key, Item]) -> None:
        """Take a sequence out of the slot or line."""
        caller = sequence.caller
        if sequence.slot is not None:
            self.slots[sequence.slot] = None
            sequence.slot = None
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]
            return
        self._lines[caller].remove(sequence)
        self._shorten(caller)

    def fill(self) -> None:
        """Give free slots to waiting sequences, lowest slot first."""
        while self._lines and None in self.slots:
            caller = self._next_caller()
            sequence = self._lines[caller].popleft()
            self._lines.move_to_end(caller)
            self._shorten(caller)
            sequence.slot = self.slots.index(None)
            self.slots[sequence.slot] = sequence
            self._held[caller] += 1

    def waiting(self) -> Iterator[LiveSequence[Key, Item]]:
        """Yield the waiting sequences: of each caller in order, one caller after the other."""
        for line in self._lines.values():
            yield from line

    def next_to_yield(self, now_ns: int) -> tuple[LiveSequence[Key, Item] | None, int]:
        """Return the idle sequence that must give way now, or None, and the time at which a
        sequence must give way if no request comes."""
        if not self._lines:
            return None, NEVER_NS
        caller = self._next_caller()
        enough = self._held[caller] + 2
        if max(self._held.values()) < enough:
            return None, NEVER_NS
        waits_since_ns = self._lines[caller][0].waiting[0].arrived_ns
        first: LiveSequence[Key, Item] | None = None
        rank = (NEVER_NS, NEVER_NS)
        for sequence in self.slots:
            if sequence is None or not sequence.is_idle or self._held[sequence.caller] < enough:
                continue
            since_ns = sequence.quiet_ns
            if self._held[sequence.caller] > self._share:
                since_ns = min(since_ns, waits_since_ns)
            if (since_ns, sequence.quiet_ns) < rank:
                first, rank = sequence, (since_ns, sequence.quiet_ns)
        if first is None:
            return None, NEVER_NS
        at_ns = rank[0] + self._patience_ns
        return (first if now_ns >= at_ns else None), at_ns

    def _shorten(self, caller: int) -> None:
        """Count a sequence that has left the line of a caller."""
        self.backlog -= 1
        if not self._lines[caller]:
            del self._lines[caller]

    def _next_caller(self) -> int:
        """Return the caller whose sequence gets the next free slot."""
        return min(self._lines, key=self._held.__getitem__)
