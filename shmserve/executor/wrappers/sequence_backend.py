"""A backend of requests that belong to sequences, around one that knows nothing of them.

The model gets control tensors and states as inputs that no client has sent, and what it gives for
its states stays here until the sequence's next request. Several requests come in the order of
their slots (`direct`) or of their arrival (`oldest`).

`core.scheduling.sequence_queue` knows the sequences of the instance, which of them have a slot, and
which request runs next. The second thread always looks after the channels of such a model, so that
frontends see a new status page without waiting for the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from shmserve.core.scheduling.sequence_queue import SequenceId
from shmserve.errors import Internal, ModelFailure
from shmserve.executor import backends
from shmserve.executor.backend import (
    Backend,
    BatchForm,
    Context,
    Request,
    Response,
)
from shmserve.executor.backends.config_merge import with_own_tensors
from shmserve.executor.tensors.batch import split, split_rows
from shmserve.executor.tensors.memory_input import MemoryInput
from shmserve.executor.wrappers.sequence_requests import (
    GapRequest,
    SequenceRequest,
    StackedRequest,
)
from shmserve.executor.wrappers.sequence_tensors import (
    Controls,
    Flags,
    States,
    with_sequence_tensors,
    without_sequence_tensors,
)
from shmserve.protocol.triton_config.backend_kinds import PYTHON
from shmserve.tensor.config_document import SequenceEntry
from shmserve.tensor.dtypes import DATATYPES, object_array
from shmserve.tensor.spec import ModelSpec

Array = np.ndarray[Any, Any]
_NO_SEQUENCE = 0


class SequenceBackend:
    """A loaded backend with what its sequences need.

    Attributes:
        controls: what the model is told of each request.
        states: what its sequences have left.
        takes_batches, stacks: whether it takes several requests, and those as one.
        slot_of: the slot of a sequence. A model that is told which rows are ready gets one for
            each slot up to the last one that is; None: it has none between.
    """

    batching = BatchForm.LISTED

    def __init__(
        self, backend: Backend, spec: ModelSpec, entry: SequenceEntry, context: Context
    ) -> None:
        self._backend = backend
        self._decoupled = spec.decoupled
        self._xp = context.xp if backend.device == context.device else np
        self.controls = Controls(entry.control_input, spec.max_batch_size > 0)
        self.states = States(spec, entry.state, context.directory)
        self.takes_batches = backend.batching is not BatchForm.ALONE
        self.stacks = backend.batching is BatchForm.STACKED
        self.slot_of: Callable[[SequenceId], int] | None = None
        self.chooses_device = backend.chooses_device
        self.device = backend.device
        self.reads_on_device = backend.reads_on_device
        self._over = threading.Lock()  # between the end of a run and answers that keep states
        self.load = backend.load
        self.close = backend.close

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Run requests of different sequences together, or one of none."""
        steps: list[SequenceRequest] = [self._step(request) for request in requests]
        places = list(range(len(steps)))
        if self.slot_of is not None and self.takes_batches and self.controls.has_ready:
            steps, places = self._with_gaps(steps, self.slot_of)
        try:
            if self.stacks and len(steps) > 1:
                answers = self._stacked(steps)
            else:
                answers = self._backend.execute(steps)
        finally:
            with self._over:
                for step in steps:
                    step.end()
        if self._decoupled:
            return answers
        if len(answers) != len(steps):
            raise Internal(f"the model gave {len(answers)} responses to {len(steps)} requests")
        return [
            self._taken(request, answers[place])
            for request, place in zip(requests, places, strict=True)
        ]

    def _step(self, request: Request) -> SequenceRequest:
        sequence = sequence_of(request.parameters) or _NO_SEQUENCE
        flags = flags_of(request.parameters)
        if sequence == _NO_SEQUENCE:  # a sample that warms the model up
            flags = Flags(start=True, end=True)
        return self._request(request, sequence, flags)

    def _request(self, request: Request, sequence: SequenceId, flags: Flags) -> SequenceRequest:
        added = self._added(sequence, flags)
        take_states = partial(self._taken_of_stream, request)
        return SequenceRequest(request, added, tuple(self.states.outputs), self._xp, take_states)

    def _added(self, sequence: SequenceId, flags: Flags) -> dict[str, MemoryInput]:
        """Controls and states, by the names of the inputs that they are."""
        added = {
            **self.controls.arrays(sequence, flags),
            **self.states.arrays(sequence, flags.start),
        }
        return {name: MemoryInput(name, k, array, self._xp) for name, (k, array) in added.items()}

    def _taken(self, request: Request, response: Response) -> Response:
        """The response without the states, which are kept."""
        if response.error is not None:
            return response
        response = self._without_states(request, response)
        if request.rescheduled and response.outputs:
            return Response(
                error=ModelFailure(
                    "a request that is rescheduled is answered by None, or with states only: "
                    f"the model gave output '{response.outputs[0].name}'"
                )
            )
        return response

    def _taken_of_stream(
        self, request: Request, step: SequenceRequest, response: Response
    ) -> Response | None:
        """As `_taken`, of one response among several: states alone are none for the client, and
        those that come after the run are nobody's."""
        if response.error is not None or not self.states.outputs:
            return response
        with self._over:
            without = self._without_states(request, response, keeps=not step.over)
        return without if without.outputs or not response.outputs else None

    def _without_states(self, request: Request, response: Response, keeps: bool = True) -> Response:
        sequence = sequence_of(request.parameters)
        if keeps and sequence and self.states.outputs:
            outputs = {
                output.name: _own(output.array)
                for output in response.outputs
                if output.name in self.states.outputs
            }
            if outputs or (request.responses is None and not request.rescheduled):
                self.states.keep(sequence, outputs)
        wanted = tuple(output for output in response.outputs if output.name in request.requested)
        return msgspec.structs.replace(response, outputs=wanted)

    def _stacked(self, steps: Sequence[SequenceRequest]) -> Sequence[Response]:
        inputs = {
            name: MemoryInput(
                name,
                tensor.datatype,
                np.concatenate([step.inputs[name].numpy() for step in steps]),
                self._xp,
            )
            for name, tensor in steps[0].inputs.items()
        }
        responses = self._backend.execute([StackedRequest(steps, inputs, self._xp)])
        rows = partial(split_rows, sizes=[1] * len(steps))
        return split(responses, rows, [step.sent_bytes for step in steps])

    def _with_gaps(
        self, steps: Sequence[SequenceRequest], slot_of: Callable[[SequenceId], int]
    ) -> tuple[list[SequenceRequest], list[int]]:
        """The steps, each at the number of its slot, and these; between them requests that the
        model is told are not ready."""
        places = [slot_of(sequence_of(step.parameters)) for step in steps]
        by_slot = dict(zip(places, steps, strict=True))
        filled = [by_slot.get(slot) or self._gap(steps[0]) for slot in range(max(places) + 1)]
        return filled, places

    def _gap(self, like: SequenceRequest) -> SequenceRequest:
        inputs = self._added(_NO_SEQUENCE, Flags(start=False, end=False, ready=False))
        for name, tensor in like.inputs.items():
            if name not in inputs:
                zeros = _zeros(tensor.datatype, tensor.shape)
                inputs[name] = MemoryInput(name, tensor.datatype, zeros, self._xp)
        return GapRequest(like, inputs, tuple(self.states.outputs), self._xp)


def load(backend: Backend, context: Context) -> tuple[Backend, ModelSpec]:
    """As `backends.load`; that of a model with `sequence_batching` is a `SequenceBackend`."""
    told = context.spec
    entry = told.config.sequence_batching
    if entry is UNSET:
        return backends.load(backend, context)
    if told.backend == PYTHON:
        told = with_own_tensors(told, context.directory)
    inner = msgspec.structs.replace(context, spec=with_sequence_tensors(told, entry))
    loaded, spec = backends.load(backend, inner)
    try:
        wrapped = SequenceBackend(loaded, spec, entry, context)
    except BaseException:
        loaded.close()
        raise
    return wrapped, without_sequence_tensors(spec, told)


def sequence_of(parameters: dict[str, Any]) -> SequenceId:
    """The sequence that a request belongs to; 0 or "": none."""
    sequence: SequenceId = parameters.get("sequence_id", 0)
    return sequence


def flags_of(parameters: dict[str, Any]) -> Flags:
    """Whether a request begins its sequence, and whether it ends it."""
    return Flags(bool(parameters.get("sequence_start")), bool(parameters.get("sequence_end")))


def _own(array: Any) -> Array:
    """A copy in memory of our own, on the host."""
    if isinstance(array, np.ndarray):
        return array.copy()
    array.device.synchronize()  # the model may have used a stream of its own
    copied: Array = array.get()
    return copied


def _zeros(datatype: str, shape: tuple[int, ...]) -> Array:
    if datatype == "BYTES":
        return object_array([b""] * int(np.prod(shape)), shape)
    return np.zeros(shape, DATATYPES[datatype].numpy)
