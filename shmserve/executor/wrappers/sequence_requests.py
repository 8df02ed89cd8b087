"""Sequence requests: requests as a model with sequences sees them, with controls and states."""

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
    """Request as the model sees it; implements `backend.Request`.

    Args:
        request: the client's request.
        added: control tensors and states, as inputs.
        states: names of the state outputs. Clients may request state outputs, too.
        xp: array module of the backend's device: numpy or CuPy.
        take_states: takes the states out of each response of a stream. Returns the response for
            the client, or None if no output is left.

    Attributes:
        over: True once the model has returned from this run.
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
        self._placed = request.requested  # outputs that may be written in place
        self.id = request.id
        self.parameters = request.parameters
        self.deadline_ns = request.deadline_ns
        self.callers = request.callers
        self.traceparent = request.traceparent
        self.sequence = request.sequence
        self.inputs: dict[str, InputTensor] = {**request.inputs, **added}
        self.requested = (
            *request.requested,
            *(name for name in states if name not in request.requested),
        )

    @property
    def sent_bytes(self) -> int:
        """Size of the client's inputs, in bytes."""
        return sum(len(tensor.buffer) for tensor in self._request.inputs.values())

    @property
    def cancelled(self) -> bool:
        return self._request.cancelled

    def reschedule(self, again: bool) -> None:
        if self.over:  # too late: the run has ended
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
    """Several requests as one, for the outputs of all requests together. `inputs`: inputs of all
    requests, concatenated by rows."""

    def __init__(
        self, requests: Sequence[Request], inputs: dict[str, MemoryInput], xp: Any
    ) -> None:
        first = requests[0]
        super().__init__(first, inputs, (), xp)
        self._all = requests
        self.requested = tuple(dict.fromkeys(name for r in requests for name in r.requested))
        self._placed = ()
        self.parameters, self.sequence = {}, None
        self.deadline_ns = 0
        self.callers = tuple(dict.fromkeys(c for r in requests for c in r.callers))

    @property
    def cancelled(self) -> bool:
        return all(request.cancelled for request in self._all)


class GapRequest(SequenceRequest):
    """Placeholder for an idle slot, with the shapes of another slot's request. Inputs, output
    memory, id, parameters and deadline are not shared with the other request."""

    def __init__(
        self, like: SequenceRequest, inputs: dict[str, MemoryInput], states: Sequence[str], xp: Any
    ) -> None:
        super().__init__(like, inputs, states, xp)
        self._placed = ()
        self.id, self.parameters, self.sequence, self.traceparent = "", {}, None, ""
        self.deadline_ns = 0
        if like.responses is not None:
            self.responses = _NoResponses()

    @property
    def cancelled(self) -> bool:
        return False

    def reschedule(self, again: bool) -> None:
        self.rescheduled = again  # each run makes new gaps


class StepResponses:
    """Responses of one run of a decoupled model's request, without states; implements
    `backend.Responses`."""

    def __init__(self, source: Responses, step: SequenceRequest, take_states: TakeStates) -> None:
        self._source = source
        self._step = step
        self._take_states = take_states
        self.fail = source.fail

    def send(self, response: Response | None, final: bool = False) -> None:
        remaining = None if response is None else self._take_states(self._step, response)
        if remaining is not None or final:
            self._source.send(remaining, final)

    def abandoned(self) -> None:
        """Report a lost sender, unless the request runs again: the next run has a new sender."""
        if not self._step.rescheduled:
            self._source.abandoned()


class _NoResponses:
    """Responses of a gap request: all are dropped."""

    def send(self, response: Response | None, final: bool = False) -> None:
        """Drop the response."""

    def fail(self, error: ShmserveError) -> None:
        """Do nothing: the other requests of the batch report the error."""

    def abandoned(self) -> None:
        """Do nothing: a gap has no stream to end."""
