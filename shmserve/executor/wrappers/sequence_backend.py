"""Sequence backend: runs requests of sequences on a backend that knows nothing of sequences.

The model gets control tensors and states as further inputs, which clients do not send. State
outputs stay here until the next request of the sequence. Requests of a batch come in the order of
their slots (`direct`) or of their arrival (`oldest`).

`core.scheduling.sequence_queue` knows the sequences of the instance and their slots, and decides
which request runs next. A second thread always looks after the channels of such a model, so
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

from shmserve.core.scheduling.sequence_names import SequenceId
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
from shmserve.executor.tensors.memory_input import MemoryInput, zeros
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
from shmserve.tensor.spec import ModelSpec

Array = np.ndarray[Any, Any]
_NO_SEQUENCE = 0


class SequenceBackend:
    """Loaded backend with the control tensors and states of its sequences.

    Attributes:
        controls: control tensors of the model.
        states: states that sequences have left for their next requests.
        takes_batches: True if the backend takes several requests at once.
        stacks: True if the backend takes a batch as one request.
        slot_of: returns the slot of a sequence; None unless a batch is ordered by slots. A model
            with a READY control then gets one request for each slot, up to the highest slot in
            use.
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
        self._over = threading.Lock()  # guards `over` of requests while states of answers are kept
        self.load = backend.load
        self.close = backend.close

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Run requests of different sequences together, or one request without a sequence."""
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
                    step.over = True
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
        if sequence == _NO_SEQUENCE:  # a warm-up sample
            flags = Flags(start=True, end=True)
        return self._request(request, sequence, flags)

    def _request(self, request: Request, sequence: SequenceId, flags: Flags) -> SequenceRequest:
        added = self._added(sequence, flags)
        take_states = partial(self._taken_of_stream, request)
        return SequenceRequest(request, added, tuple(self.states.outputs), self._xp, take_states)

    def _added(self, sequence: SequenceId, flags: Flags) -> dict[str, MemoryInput]:
        """Return control tensors and states by the names of their inputs."""
        added = {
            **self.controls.arrays(sequence, flags),
            **self.states.arrays(sequence, flags.start),
        }
        return {name: MemoryInput(name, k, array, self._xp) for name, (k, array) in added.items()}

    def _taken(self, request: Request, response: Response) -> Response:
        """Keep the states of a response. Return the response without states, or an error if a
        rescheduled request has other outputs."""
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
        """Keep the states of one response of a stream. Return the response without states, or None
        if no output is left for the client. States sent after the end of the run are dropped."""
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
        requested = tuple(output for output in response.outputs if output.name in request.requested)
        return msgspec.structs.replace(response, outputs=requested)

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
        """Return a request for every slot, and the slot of each step. Slots between the steps get
        gap requests, which the model sees as not ready."""
        places = [slot_of(sequence_of(step.parameters)) for step in steps]
        by_slot = dict(zip(places, steps, strict=True))
        filled = [by_slot.get(slot) or self._gap(steps[0]) for slot in range(max(places) + 1)]
        return filled, places

    def _gap(self, like: SequenceRequest) -> SequenceRequest:
        inputs = self._added(_NO_SEQUENCE, Flags(start=False, end=False, ready=False))
        for name, tensor in like.inputs.items():
            if name not in inputs:
                array = zeros(tensor.datatype, tensor.shape)
                inputs[name] = MemoryInput(name, tensor.datatype, array, self._xp)
        return GapRequest(like, inputs, tuple(self.states.outputs), self._xp)


def load(backend: Backend, context: Context) -> tuple[Backend, ModelSpec]:
    """Load a backend as `backends.load` does. For a model with `sequence_batching`, return a
    `SequenceBackend` around the loaded backend."""
    client_spec = context.spec
    entry = client_spec.config.sequence_batching
    if entry is UNSET:
        return backends.load(backend, context)
    if client_spec.backend == PYTHON:
        client_spec = with_own_tensors(client_spec, context.directory)
    inner = msgspec.structs.replace(context, spec=with_sequence_tensors(client_spec, entry))
    loaded, spec = backends.load(backend, inner)
    try:
        wrapped = SequenceBackend(loaded, spec, entry, context)
    except BaseException:
        loaded.close()
        raise
    return wrapped, without_sequence_tensors(spec, client_spec)


def sequence_of(parameters: dict[str, Any]) -> SequenceId:
    """Return the id of a request's sequence; 0 or "" if the request belongs to no sequence."""
    sequence: SequenceId = parameters.get("sequence_id", 0)
    return sequence


def flags_of(parameters: dict[str, Any]) -> Flags:
    """Return the start and end flags of a request."""
    return Flags(bool(parameters.get("sequence_start")), bool(parameters.get("sequence_end")))


def _own(array: Any) -> Array:
    """Return a copy of an array in host memory."""
    if isinstance(array, np.ndarray):
        return array.copy()
    array.device.synchronize()  # the model may have used another CUDA stream
    copied: Array = array.get()
    return copied
