"""Answers that a frontend process keeps, for models with `response_cache`.

Answers are copied into slots of the process's own arena, so they need no executor and outlive it.
A reader has a lease on the slots of its answer, and eviction waits for nobody. `cache_key` says
what an answer is known by.

Frontends keep answers, and not executors: a hit costs no message, waits for no model, may be that
of an ensemble, and outlives the executor. A `CachedCall` stands before the call, also before that
of a step. Kept answers go when a `Trim` comes and when the process's own requests find no memory.
To the coordinator they are bytes of an arena.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from shmserve.core.memory.lru_book import LruBook
from shmserve.core.memory.slots import Slot
from shmserve.dispatch.cache.cache_key import Revisions
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.errors import ArenaExhausted, Unavailable
from shmserve.protocol.control.data_messages import Parameter

Model = tuple[str, str]  # name, version

_MOST_WANTED = 256
_ENTRY_BYTES = 1 << 10  # of an answer beside its slots and parameters


class CachedAnswer(Struct, frozen=True):
    """An answer of a model version; its outputs lie in `slots` of `memory`, one each, in order.

    revisions: those of the models that it came from.
    """

    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Parameter]
    slots: tuple[Slot, ...]
    model: Model
    revisions: Revisions
    memory: ForwardingMemory

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.outputs, self.parameters)

    def give_back(self) -> None:
        """End the lease of a reader, or of the cache itself."""
        for slot in self.slots:
            self.memory.release(slot.number, slot.generation)

    def give(self, name: str) -> StepTensor | None:
        """Return an output as the input of a step, with a lease of its own; None: has no such."""
        for output, slot in zip(self.outputs, self.slots, strict=True):
            if output.name == name:
                at = self.memory.pass_slot(slot, 0, output.view.nbytes)
                self.memory.lease(at)
                return StepTensor(output.datatype, output.shape, at)
        return None


class AnswerCache(Protocol):
    """Answers by their keys. Each method is for any thread."""

    def get(self, key: bytes, revisions: Revisions) -> CachedAnswer | None:
        """Return the answer of these revisions, with a lease that its `give_back` ends."""

    def put(self, key: bytes, revisions: Revisions, model: Model, outcome: Outcome) -> int:
        """Keep a copy of an answer if there is room for it now; return how many bytes were
        copied."""

    def evict(self, nbytes: int) -> bool:
        """Let go of at least `nbytes` bytes, the least recently used answers first. Return False
        if no answer was left."""


class ResponseCache(AnswerCache):
    """The `AnswerCache` of one process. `limit`: bytes at most, of slots and of what goes with
    them."""

    def __init__(self, memory: ForwardingMemory, limit: int) -> None:
        self._memory = memory
        self._limit = limit
        self._wanted: deque[int] = deque(maxlen=_MOST_WANTED)  # sizes that had no slot
        self._book: LruBook[bytes, CachedAnswer] = LruBook(limit)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._book.nbytes

    def by_model(self) -> defaultdict[tuple[str, str], tuple[int, int]]:
        """How many answers of each model version are kept, and their bytes."""
        kept: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        with self._lock:
            for answer, nbytes in self._book.items():
                answers, total = kept[answer.model]
                kept[answer.model] = answers + 1, total + nbytes
        return kept

    def get(self, key: bytes, revisions: Revisions) -> CachedAnswer | None:
        with self._lock:
            answer = self._book.get(key)
            if answer is None or answer.revisions != revisions:
                return None
            for slot in answer.slots:
                self._memory.lease(slot)
            return answer

    def put(self, key: bytes, revisions: Revisions, model: Model, outcome: Outcome) -> int:
        copied = sum(output.view.nbytes for output in outcome.outputs)
        beside = _ENTRY_BYTES + len(repr(outcome.parameters))
        if copied + beside > self._limit:
            return 0
        slots: list[Slot] = []
        for output in outcome.outputs:
            slot = self._place(max(1, output.view.nbytes))
            if slot is None:
                for each in slots:
                    self._memory.reclaim(each)
                return 0
            slots.append(slot)
            slot.view[: output.view.nbytes] = output.view
        outputs = tuple(
            OutputTensor(o.name, o.datatype, o.shape, slot.view.toreadonly()[: o.view.nbytes])
            for o, slot in zip(outcome.outputs, slots, strict=True)
        )
        for slot in slots:
            self._memory.seal_and_lease(slot)
        parameters = dict(outcome.parameters)
        answer = CachedAnswer(outputs, parameters, tuple(slots), model, revisions, self._memory)
        with self._lock:
            gone = self._book.add(key, answer, beside + sum(slot.size for slot in slots))
        _let_go(gone)
        return copied

    def _place(self, nbytes: int) -> Slot | None:
        """A slot, of the memory that is there: a request never waits for more of it."""
        slot = self._memory.reserve_now(nbytes)
        if slot is None and self.evict(self.nbytes + nbytes - self._limit):
            slot = self._memory.reserve_now(nbytes)
        if slot is None:
            self._wanted.append(nbytes)
        return slot

    def grow(self) -> None:
        """Make memory for answers like those that had no slot since this was done last, as far as
        they would be kept. For the maintenance thread: it waits for the coordinator's word."""
        slots: list[Slot] = []
        room = self._limit - self.nbytes
        try:
            while self._wanted and (room := room - self._wanted[0]) >= 0:
                slots.append(self._memory.reserve(self._wanted.popleft()))
        except (ArenaExhausted, Unavailable):
            pass  # they are not kept, and if they come again they are wanted again
        finally:
            self._wanted.clear()
            for slot in slots:
                self._memory.reclaim(slot)

    def evict(self, nbytes: int) -> bool:
        with self._lock:
            gone = self._book.evict(nbytes)
        return _let_go(gone)


def _let_go(answers: Sequence[CachedAnswer]) -> bool:
    for answer in answers:
        answer.give_back()
    return bool(answers)
