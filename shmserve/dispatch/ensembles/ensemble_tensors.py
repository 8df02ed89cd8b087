"""Ensemble tensors: tensors of one request to an ensemble, each with a lease on its slot."""

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
    """Contents of an answer. `error`: error of a streaming step, for this answer only."""

    tensors: dict[str, StepTensor] = {}
    parameters: dict[str, Parameter] = {}
    error: ShmserveError | None = None

    def add(
        self,
        tensors: dict[str, StepTensor],
        parameters: Mapping[str, Parameter],
        error: ShmserveError | None,
    ) -> None:
        """Add outputs and parameters of a step."""
        self.tensors |= tensors
        self.parameters |= parameters
        self.error = error


class EnsembleTensors:
    """Tensors on the way to steps, and tensors of answers. Not for use by two threads."""

    def __init__(self, memory: ForwardingMemory) -> None:
        self._memory = memory
        self._passed: dict[Item, StepTensor] = {}
        self._answers: dict[int, EnsembleAnswer] = {}

    def add(self, item: Item, tensor: StepTensor) -> None:
        """Add a tensor for steps, and take over its lease."""
        self._passed[item] = tensor

    def get(self, item: Item) -> StepTensor | None:
        """Return a tensor for a step. Return None if an optional tensor is missing."""
        return self._passed.get(item)

    def of_request(self) -> Iterator[OutputTensor]:
        """Yield the tensors that came with the request."""
        for (name, number), tensor in self._passed.items():
            if number == ONCE:
                yield tensor.output(name)

    def take(self, items: Iterable[Item]) -> list[StepTensor]:
        """Remove and return tensors needed by no further step, for release."""
        return [t for item in items if (t := self._passed.pop(item, None)) is not None]

    def answer(self, number: int) -> EnsembleAnswer:
        """Return the answer of this number, possibly incomplete."""
        return self._answers.setdefault(number, EnsembleAnswer())

    def take_answer(self, number: int) -> EnsembleAnswer:
        """Return a complete answer, with leases of its own."""
        once = self.answer(ONCE)
        for tensor in once.tensors.values():
            self.lease(tensor)
        if number == ONCE:
            return EnsembleAnswer(dict(once.tensors), once.parameters)
        own = self._answers.pop(number, None) or EnsembleAnswer()
        tensors, parameters = once.tensors | own.tensors, once.parameters | own.parameters
        return EnsembleAnswer(tensors, parameters, own.error)

    def lease(self, tensor: StepTensor) -> None:
        """Add a lease on the tensor's slot."""
        if isinstance(tensor.at, Slot):
            self._memory.lease(tensor.at)

    def release(self, tensors: Iterable[StepTensor]) -> None:
        """Give leases back."""
        for tensor in tensors:
            if isinstance(tensor.at, Slot):
                self._memory.release(tensor.at.number, tensor.at.generation)

    def close(self) -> None:
        """Give all leases back. Idempotent."""
        passed, self._passed = self._passed, {}
        answers, self._answers = self._answers, {}
        self.release(passed.values())
        for answer in answers.values():
            self.release(answer.tensors.values())
