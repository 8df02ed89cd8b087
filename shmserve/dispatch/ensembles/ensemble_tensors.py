"""The tensors of one request to an ensemble, each with a lease on its slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from shmserve.core.memory.slots import Slot
from shmserve.core.scheduling.ensemble_progress import ONCE, Item
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.outcome import OutputTensor
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.errors import ShmserveError
from shmserve.protocol.control.data_messages import Parameter


class EnsembleAnswer(Struct):
    """What an answer is made of; `error`: of a step that streams, of this answer only."""

    tensors: dict[str, StepTensor] = {}
    parameters: dict[str, Parameter] = {}
    error: ShmserveError | None = None

    def add(
        self,
        tensors: dict[str, StepTensor],
        parameters: Mapping[str, Parameter],
        error: ShmserveError | None,
    ) -> None:
        """A step has given something of it."""
        self.tensors |= tensors
        self.parameters |= parameters
        self.error = error


class EnsembleTensors:
    """Tensors on their way to steps, and those of answers; not for use by two threads."""

    def __init__(self, memory: ForwardingMemory) -> None:
        self._memory = memory
        self._passed: dict[Item, StepTensor] = {}
        self._answers: dict[int, EnsembleAnswer] = {}

    def add(self, item: Item, tensor: StepTensor) -> None:
        """One for steps, whose lease this has from now on."""
        self._passed[item] = tensor

    def get(self, item: Item) -> StepTensor | None:
        """One for a step; None: it is optional, and not there."""
        return self._passed.get(item)

    def of_request(self) -> Iterator[OutputTensor]:
        """Those that came with the request, by name."""
        for (name, number), tensor in self._passed.items():
            if number == ONCE:
                yield tensor.output(name)

    def take(self, items: Iterable[Item]) -> list[StepTensor]:
        """Those that no step needs any more, to be released."""
        return [t for item in items if (t := self._passed.pop(item, None)) is not None]

    def answer(self, number: int) -> EnsembleAnswer:
        """The answer of this number, as far as it is there."""
        return self._answers.setdefault(number, EnsembleAnswer())

    def take_answer(self, number: int) -> EnsembleAnswer:
        """An answer that is complete, with leases of its own."""
        once = self.answer(ONCE)
        for tensor in once.tensors.values():
            self.lease(tensor)
        if number == ONCE:
            return EnsembleAnswer(dict(once.tensors), once.parameters)
        own = self._answers.pop(number, None) or EnsembleAnswer()
        tensors, parameters = once.tensors | own.tensors, once.parameters | own.parameters
        return EnsembleAnswer(tensors, parameters, own.error)

    def lease(self, tensor: StepTensor) -> None:
        """One more lease on it."""
        if isinstance(tensor.at, Slot):
            self._memory.lease(tensor.at)

    def release(self, tensors: Iterable[StepTensor]) -> None:
        """Give leases back."""
        for tensor in tensors:
            if isinstance(tensor.at, Slot):
                self._memory.release(tensor.at.number, tensor.at.generation)

    def close(self) -> None:
        """Give all of them back. Idempotent."""
        passed, self._passed = self._passed, {}
        answers, self._answers = self._answers, {}
        self.release(passed.values())
        for answer in answers.values():
            self.release(answer.tensors.values())
