"""The requests of sequences as a model sees them: with controls and states, and without a client's
view of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.executor.backend import InputTensor, Request, Response, Responses
from shmserve.executor.tensors.memory_input import MemoryInput
from shmserve.tensor.dtypes import DATATYPES

Array = np.ndarray[Any, Any]
TakeStates = Callable[["SequenceRequest", Response], Response | None]


class SequenceRequest:
    """A request as the model sees it; implements `backend.Request`.

    `inputs`: what the client sent and what is added to it; `states`: names of the outputs that
    are kept; those the client wants as well are its own, too; `take_states`: has each response of a
    stream first and returns what the client gets, None if that is nothing.

    Attributes:
        over: the model has returned from this run.
    """

    rescheduled = False
    over = False

    def __init__(
        self,
        request: Request,
        added: dict[str, MemoryInput],
        states: Sequence[str],
        xp: Any,
        take_states: TakeStates | None = None,
    ) -> None:
        self.responses: Responses | None = None
        if request.responses is not None and take_states is not None:
            self.responses = StepResponses(request.responses, self, take_states)
        self._request = request
        self._xp = xp
        self._placed = request.requested  # whose arrays may lie in the request's own outputs
        self.id = request.id
        self.parameters = request.parameters
        self.deadline_ns = request.deadline_ns
        self.callers = request.callers
        self.traceparent = request.traceparent
        self.inputs: dict[str, InputTensor] = {**request.inputs, **added}
        self.requested = (
            *request.requested,
            *(name for name in states if name not in request.requested),
        )

    @property
    def sent_bytes(self) -> int:
        """Of its client's inputs."""
        return sum(len(tensor.buffer) for tensor in self._request.inputs.values())

    @property
    def cancelled(self) -> bool:
        return self._request.cancelled

    def end(self) -> None:
        """Note that the model has returned from this run."""
        self.over = True

    def reschedule(self, again: bool) -> None:
        if self.over:  # nobody would run it again
            return
        self.rescheduled = again
        self._request.reschedule(again)

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        if name in self._placed:
            return self._request.offer(name, datatype, shape)
        return np.empty(shape, DATATYPES[datatype].numpy)

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        if name in self._placed:
            return self._request.offer_on_device(name, datatype, shape)
        return self._xp.empty(shape, DATATYPES[datatype].numpy)


class StackedRequest(SequenceRequest):
    """Several as one. `inputs`: those of all, behind each other."""

    def __init__(
        self, requests: Sequence[Request], inputs: dict[str, MemoryInput], xp: Any
    ) -> None:
        first = requests[0]
        super().__init__(first, inputs, (), xp)
        self._all = requests
        self._placed = ()
        self.parameters = {}
        self.deadline_ns = 0
        self.callers = tuple(dict.fromkeys(c for r in requests for c in r.callers))

    @property
    def cancelled(self) -> bool:
        return all(request.cancelled for request in self._all)


class GapRequest(SequenceRequest):
    """What stands in a slot that has nothing to do: it looks like the request of another slot,
    and nothing of that one's is its own, least of all where its outputs go."""

    def __init__(
        self, like: SequenceRequest, inputs: dict[str, MemoryInput], states: Sequence[str], xp: Any
    ) -> None:
        super().__init__(like, inputs, states, xp)
        self._placed = ()
        self.id, self.parameters, self.traceparent = "", {}, ""
        self.deadline_ns = 0
        if like.responses is not None:
            self.responses = _NoResponses()

    @property
    def cancelled(self) -> bool:
        return False

    def reschedule(self, again: bool) -> None:
        self.rescheduled = again  # a gap comes again where it is needed


class StepResponses:
    """Where the responses of one run of a decoupled model's request go; implements
    `backend.Responses`."""

    def __init__(self, source: Responses, step: SequenceRequest, take_states: TakeStates) -> None:
        self._source = source
        self._step = step
        self._take_states = take_states
        self.fail = source.fail

    def send(self, response: Response | None, final: bool = False) -> None:
        wanted = None if response is None else self._take_states(self._step, response)
        if wanted is not None or final:
            self._source.send(wanted, final)

    def abandoned(self) -> None:
        """One that comes again has another sender then."""
        if not self._step.rescheduled:
            self._source.abandoned()


class _NoResponses:
    """Of a gap: nobody wants what the model says of it."""

    def send(self, response: Response | None, final: bool = False) -> None:
        """Drop it."""

    def fail(self, error: ShmserveError) -> None:
        """Those of the requests beside it have the error, too."""

    def abandoned(self) -> None:
        """There is no stream to end."""
