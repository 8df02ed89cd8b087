"""Answers that a frontend process keeps, for models with `response_cache`.

They are copied into slots of the process's own arena, so they need no executor and outlive it;
whoever is given one has a lease on its slots, and eviction waits for nobody. An answer is known by
a digest of all that it depends on: the model and its revision (of an ensemble: those of all models
in it), the outputs asked for, the parameters, and the inputs' bytes, which lie sealed in slots.

Frontends keep answers, and not executors: a hit costs no message, waits for no model, may be that
of an ensemble, and outlives the executor. A `CachedCall` stands before the call, also before that
of a step. Kept answers go when a `Trim` comes and when the process's own requests find no memory.
To the coordinator they are bytes of an arena.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from hashlib import sha256

from msgspec import UNSET, Struct

from shmserve.core.memory.lru_book import LruBook
from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.outcome import Outcome, OutputTensor, RunOptions
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.errors import ArenaExhausted, Unavailable
from shmserve.protocol.control.data_messages import Parameter

_MOST_WANTED = 256
_ENTRY_BYTES = 1 << 10  # of an answer beside its slots and parameters
_OF_THE_REQUEST = {"priority", "timeout"}  # parameters that say when it runs, not what comes of it


class CacheInput(Struct, frozen=True):
    """An input; `view`: bytes that nobody writes any more."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview


class CachedAnswer(Struct, frozen=True):
    """An answer of a model version; its outputs lie in `slots`, one each, in their order."""

    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Parameter]
    slots: tuple[Slot, ...]
    model: tuple[str, str]

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.outputs, self.parameters)


class ResponseCache:
    """For any thread. `limit`: bytes at most, of slots and of what goes with them."""

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

    def get(self, key: bytes) -> CachedAnswer | None:
        """The answer, with a lease on each of its slots; `give_back` ends those."""
        with self._lock:
            answer = self._book.get(key)
            if answer is not None:
                for slot in answer.slots:
                    self._memory.lease(slot)
            return answer

    def put(self, key: bytes, model: tuple[str, str], outcome: Outcome) -> int:
        """Keep a copy of an answer if there is room for it now; how many bytes were copied."""
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
        answer = CachedAnswer(outputs, dict(outcome.parameters), tuple(slots), model)
        with self._lock:
            gone = self._book.add(key, answer, beside + sum(slot.size for slot in slots))
        self._let_go(gone)
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

    def give_back(self, answer: CachedAnswer) -> None:
        """It is read no more by whoever got it."""
        self._let_go([answer])

    def step_tensor(self, output: OutputTensor, slot: Slot) -> StepTensor:
        """An output of an answer that was given, with a lease of its own."""
        at = self._memory.pass_slot(slot, 0, output.view.nbytes)
        self._memory.lease(at)
        return StepTensor(output.datatype, output.shape, at)

    def evict(self, nbytes: int) -> bool:
        """Let go of so many bytes, the least recently used first; False: there are none."""
        with self._lock:
            gone = self._book.evict(nbytes)
        self._let_go(gone)
        return bool(gone)

    def _let_go(self, answers: Sequence[CachedAnswer]) -> None:
        for answer in answers:
            for slot in answer.slots:
                self._memory.release(slot.number, slot.generation)


def digest(
    entry: ModelEntry, snapshot: Snapshot, options: RunOptions, inputs: Sequence[CacheInput]
) -> bytes | None:
    """What stands for all that an answer depends on; None: it cannot be kept."""
    served = list(_revisions(entry, snapshot))
    if options.places or None in served:
        return None
    parameters = {k: v for k, v in options.parameters.items() if k not in _OF_THE_REQUEST}
    ordered = sorted(inputs, key=lambda tensor: tensor.name)
    tensors = [(t.name, t.datatype, t.shape, t.view.nbytes) for t in ordered]
    told = (served, options.outputs, sorted(parameters.items()), tensors)
    key = sha256(repr(told).encode())  # twice as fast as blake2b where the CPU helps
    for tensor in ordered:
        key.update(tensor.view)
    return key.digest()


def unchanged(entry: ModelEntry, before: Snapshot, now: Snapshot) -> bool:
    """Whether all that an answer depends on, beside its request, is as it was before."""
    if now is before:
        return True
    spec = entry.spec
    current = now.ready_entries.get((spec.name, spec.version))
    return current is not None and [*_revisions(entry, before)] == [*_revisions(current, now)]


def _revisions(entry: ModelEntry, snapshot: Snapshot) -> Iterator[tuple[str, str, str] | None]:
    """Models, versions and revisions that an answer comes from; None: of one that is not there
    right now, or whose answers depend on more than their request."""
    spec = entry.spec
    if spec.decoupled or spec.config.sequence_batching is not UNSET:
        yield None
    elif spec.steps:
        yield spec.name, spec.version, repr(spec.steps)
        for step in spec.steps:
            of_step = snapshot.ready_entries.get((step.model, step.version))
            yield from _revisions(of_step, snapshot) if of_step is not None else (None,)
    elif not entry.instances:
        yield None
    else:
        yield spec.name, spec.version, entry.instances[0].name.partition("@")[2]
