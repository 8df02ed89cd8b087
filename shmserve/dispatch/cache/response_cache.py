"""Response cache: answers kept by a frontend process, for models with `response_cache`.

Answers are copied into slots of the process's own arena, so they need no executor and outlive the
executor. A reader holds a lease on the slots of an answer, and eviction waits for no reader.
`cache_key` describes the key of an answer.

Frontends keep answers, not executors. A hit costs no message, waits for no model, and may be the
answer of an ensemble. A `CachedCall` precedes the call, including the call of a step. Cached
answers are evicted on a `Trim`, and when the process's own requests find no memory. For the
coordinator, cached answers are bytes of an arena.
"""

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
_ENTRY_BYTES = 1 << 10  # assumed bytes of an answer beside slots and parameters


class CachedAnswer(Struct, frozen=True):
    """Answer of a model version. Each output lies in a slot of its own in `memory`, listed in
    `slots` in order. `revisions`: revisions of the models that the answer came from."""

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
        """Return an output as the input of a step, with a lease of its own. Return None for an
        unknown name."""
        for output, slot in zip(self.outputs, self.slots, strict=True):
            if output.name == name:
                at = self.memory.pass_slot(slot, 0, output.view.nbytes)
                self.memory.lease(at)
                return StepTensor(output.datatype, output.shape, at)
        return None


class AnswerCache(Protocol):
    """Cache of answers by key. All methods are thread-safe."""

    def get(self, key: bytes, revisions: Revisions) -> CachedAnswer | None:
        """Return the answer of these revisions, with a lease that `CachedAnswer.give_back` ends.
        Return None if no such answer is cached."""

    def put(self, key: bytes, revisions: Revisions, model: Model, outcome: Outcome) -> int:
        """Keep a copy of an answer if memory is free now. Return the number of bytes copied."""

    def evict(self, nbytes: int) -> bool:
        """Release at least `nbytes` bytes, least recently used answers first. Return False if no
        answer was left."""


class ResponseCache(AnswerCache):
    """`AnswerCache` of one process. `limit`: most bytes, including slots, parameters and
    overhead."""

    def __init__(self, memory: ForwardingMemory, limit: int) -> None:
        self._memory = memory
        self._limit = limit
        self._wanted: deque[int] = deque(maxlen=_MOST_WANTED)  # sizes for which no slot was free
        self._book: LruBook[bytes, CachedAnswer] = LruBook(limit)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._book.nbytes

    def by_model(self) -> defaultdict[tuple[str, str], tuple[int, int]]:
        """Return (number of answers, bytes) for each model version."""
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
        """Return a slot of existing memory, or None. A request never waits for more memory."""
        slot = self._memory.reserve_now(nbytes)
        if slot is None and self.evict(self.nbytes + nbytes - self._limit):
            slot = self._memory.reserve_now(nbytes)
        if slot is None:
            self._wanted.append(nbytes)
        return slot

    def grow(self) -> None:
        """Make memory for answers that found no slot since the last call, within the limit. For
        the maintenance thread, because growing waits for the coordinator."""
        slots: list[Slot] = []
        room = self._limit - self.nbytes
        try:
            while self._wanted and (room := room - self._wanted[0]) >= 0:
                slots.append(self._memory.reserve(self._wanted.popleft()))
        except (ArenaExhausted, Unavailable):
            pass  # not cached now; the next such answer asks again
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
