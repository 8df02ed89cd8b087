"""Cached call: a request answered from the response cache if possible, otherwise by an executor."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Protocol

from shmserve import waiting
from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.dispatch.cache.cache_key import Revisions, cache_key, models_of, revisions
from shmserve.dispatch.cache.response_cache import AnswerCache, CachedAnswer
from shmserve.dispatch.calls.request_counting import Account, CallScope
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, OutputTensor, RunOptions
from shmserve.errors import Unavailable
from shmserve.protocol.control.data_messages import RegionRef


class AnyCall(InferenceCall, Protocol):
    """A call of a model or of an ensemble, possibly itself a step."""

    entry: ModelEntry
    account: Account

    def add_tensor(self, name: str, tensor: StepTensor) -> None: ...

    def give(self, name: str) -> StepTensor | None: ...


class CachedCall(CallScope):
    """A request. On a hit, `inner` never runs and only holds the inputs; otherwise `inner` runs.
    Frontends never map client memory, which may change while being read. So a request with a region
    always runs. `current`: returns the current registry."""

    def __init__(
        self,
        cache: AnswerCache,
        inner: AnyCall,
        options: RunOptions,
        current: Callable[[], Snapshot],
    ) -> None:
        self.entry = inner.entry
        self.account = inner.account
        self.receipt = inner.receipt
        self.reserve = inner.reserve
        self.adopt = inner.adopt
        self.cancel = inner.cancel
        self._cache = cache
        self._inner = inner
        self._options = options
        self._current = current
        self._snapshot = current()
        self._inputs: list[OutputTensor] = []
        self._key = b""
        self._revisions: Revisions | None = None  # None: the answer cannot be cached
        self._readable = True  # true while no input lies in client memory
        self._answer: CachedAnswer | None = None

    # ------------------------------------------------------------------- inputs

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: Slot | RegionRef
    ) -> None:
        """Add an input, as `Call.add_input`."""
        self._inner.add_input(name, datatype, shape, at)
        self._read(name, StepTensor(datatype, shape, at))

    def add_tensor(self, name: str, tensor: StepTensor) -> None:
        """Add an ensemble's tensor, as `StepCall.add_tensor`."""
        self._inner.add_tensor(name, tensor)
        self._read(name, tensor)

    def _read(self, name: str, tensor: StepTensor) -> None:
        if isinstance(tensor.at, RegionRef):
            self._readable = False
        else:
            self._inputs.append(tensor.output(name))

    # ------------------------------------------------------------------ running

    def execute(self) -> Outcome:
        """Return the answer, as `Call.execute`."""
        kept = self._look()
        if kept is not None:
            return kept
        outcome = self._inner.execute()
        self._keep(outcome)
        return outcome

    def stream(self) -> Iterator[Outcome]:
        """Yield the answer, as `Call.stream`. A cached model gives exactly one answer."""
        kept = self._look()
        if kept is not None:
            self.account.answered()
            yield kept
            return
        with closing(self._inner.stream()) as answers:  # type: ignore[type-var]
            for outcome in answers:
                if outcome.final and outcome.error is None:
                    self._keep(outcome)
                yield outcome

    def _look(self) -> Outcome | None:
        """Return the cached answer, or None."""
        if not self._readable or self._options.places:
            return None
        began_ns = time.monotonic_ns()
        self._revisions = served = revisions(self.entry, self._snapshot)
        if served is None:
            return None
        size = sum(tensor.view.nbytes for tensor in self._inputs)
        request = (self.entry, self._snapshot, self._options, self._inputs)
        self._key = waiting.beside_if_large(size, cache_key, *request)
        self._answer = answer = self._cache.get(self._key, served)
        account = self.account
        account.looked_up(answer is not None, time.monotonic_ns() - began_ns)
        if answer is None:
            return None
        account.begin(self._options, began_ns=began_ns)
        self.receipt.finish()
        return answer.outcome

    def _keep(self, outcome: Outcome) -> None:
        # A model loaded anew meanwhile may have run in either revision.
        served = self._revisions
        if served is not None and self._is_current(served):
            size = sum(output.view.nbytes for output in outcome.outputs)
            model = (self.entry.spec.name, self.entry.spec.version)
            answer = (self._key, served, model, outcome)
            with suppress(Unavailable):  # then nothing is cached
                copied = waiting.beside_if_large(size, self._cache.put, *answer)
                self.receipt.copy_out(copied)

    def _is_current(self, served: Revisions) -> bool:
        now = self._current()
        if now is self._snapshot:
            return True
        entry = now.ready_entries.get((self.entry.spec.name, self.entry.spec.version))
        if entry is None or revisions(entry, now) != served:
            return False
        # An ensemble has no revision: its steps may have changed, and their models may not
        return models_of(entry, now) == models_of(self.entry, self._snapshot)

    def give(self, name: str) -> StepTensor | None:
        """Return an output for a step, as `StepCall.give`."""
        return self._inner.give(name) if self._answer is None else self._answer.give(name)

    # ------------------------------------------------------------------- ending

    def lend(self) -> Callable[[], None]:
        """Lend the outputs, as `Call.lend`."""
        answer, self._answer = self._answer, None
        return self._inner.lend() if answer is None else answer.give_back

    def close(self) -> None:
        """Give all slots back, as `Call.close`."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.give_back()
        self._inner.close()
