"""The seam between the executor's loop and what runs a model.

A backend lives in `shmserve.executor.backends` and knows nothing of slots, sockets
or messages: it gets `Request`s whose inputs are read-only views and gives each a
response. Everything about where bytes lie is the request's business, and on which device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, field

from shmserve.errors import ShmserveError
from shmserve.executor import custom_metrics
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.executor.custom_metrics import CustomMetrics
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.tensor.spec import ModelSpec

CPU = "cpu"


class BatchForm(Enum):
    """What a backend makes of several requests that were queued for one model."""

    ALONE = 0  # nothing: they run one by one
    LISTED = 1  # `execute` gets them as they are
    STACKED = 2  # `execute` gets one request, with their tensors behind each other


class InputTensor(Protocol):
    """One input. `buffer` is a read-only view of exactly its bytes in shared memory, or of a
    copy of them if they lie in a GPU's (`device`: "cpu", or for example "cuda:0")."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    device: str

    @property
    def buffer(self) -> memoryview: ...

    def numpy(self) -> np.ndarray[Any, Any]:
        """A read-only array of `shape`; BYTES: an object array of `bytes` (copied, then parsed)."""
        ...

    def private(self) -> np.ndarray[Any, Any]:
        """A writable copy of the array, for a model that writes into its inputs; counted."""
        ...

    def on_device(self) -> Any:
        """A CuPy array of `shape` on the instance's device: the client's own memory if it lies
        there, which is not to be written to, else a copy that is made once and counted.

        Raises:
            Internal: a BYTES tensor.
            ResourceExhausted: the device has no memory left.
        """
        ...

    def private_on_device(self) -> Any:
        """As `on_device`, for a model that writes into its inputs: never the client's memory."""
        ...


class Responses(Protocol):
    """Where the answers to a request of a decoupled model go; for any thread of the model."""

    def send(self, response: Response | None, final: bool = False) -> None:
        """Send an answer, and with `final` end the stream; None: only end it.

        Waits while the client is behind. What nobody wants any more is dropped, and then
        the request is `cancelled`. An answer that cannot be sent is replaced by its error.

        Raises:
            ProtocolViolation: `final` was sent before.
        """
        ...

    def fail(self, error: ShmserveError) -> None:
        """End the stream with an error, if it has not ended; later answers are dropped."""
        ...

    def abandoned(self) -> None:
        """Nobody can send any more: an open stream ends with an error. Safe in finalizers."""
        ...


class Request(Protocol):
    """One request as a backend sees it."""

    id: str
    parameters: dict[str, Parameter]
    requested: tuple[str, ...]  # names of the wanted outputs, never empty
    deadline_ns: int  # CLOCK_MONOTONIC, 0: none
    callers: tuple[CallingModel, ...]  # models that wait for the answer
    traceparent: str  # what the model's own work is part of (W3C Trace Context); empty: nothing
    responses: Responses | None  # of decoupled models; None: the answer is returned
    rescheduled: bool  # it is to run again: see `reschedule`

    def reschedule(self, again: bool) -> None:
        """Before `execute` returns: whether the request is to run once more, in a later batch.
        Its answer may hold states only then. Only for models of iterative sequences."""
        ...

    @property
    def inputs(self) -> Mapping[str, InputTensor]:
        """Inputs by name, in the request's order."""
        ...

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        ...

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A writable array in the output slot itself (no BYTES): what is written there is sent.

        Raises:
            ArenaExhausted: the pool has no room for it.
        """
        ...

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """A CuPy array on the instance's device (no BYTES) to give as the output: the client's
        own memory if the output goes there, else memory that is copied out once and counted.

        Raises:
            ResourceExhausted: the device has no memory left.
        """
        ...


class Output(Struct, frozen=True):
    """One output of a response. `array`: a numpy or a CuPy array of any layout; BYTES as an
    object array of bytes or str. What fills a CuPy array may still be under way."""

    name: str
    datatype: str
    array: Any


class Response(Struct, frozen=True):
    """The answer to one request: outputs, or an error.

    `copied`: bytes that the backend itself has moved into offered outputs, for the receipt.
    """

    outputs: tuple[Output, ...] = ()
    error: ShmserveError | None = None
    parameters: dict[str, Parameter] = {}
    copied: int = 0


class Context(Struct, frozen=True):
    """What a backend is told when it loads."""

    spec: ModelSpec  # inputs and outputs may be empty: the backend completes them
    directory: str  # the model's folder; the version's folder is `directory`/`version`
    instance: str  # e.g. "digits/1/0"
    device: str  # "cpu" or "cuda:0": numbered as CUDA numbers them in this process
    auto: bool = False  # what cannot use the device may run on the CPU instead
    models: OtherModels = NO_MODELS  # what the server serves besides
    metrics: CustomMetrics = field(default_factory=lambda: custom_metrics.registry)

    @property
    def xp(self) -> Any:
        """The array module of the device: cupy on a GPU, numpy on the CPU."""
        if self.device == CPU:
            return np
        from shmserve.cuda import runtime

        return runtime.cupy()


class Backend(Protocol):
    """Runs one model instance in a process of its own; called by the main thread only.

    Known when it is loaded: `device`, where it computes ("cpu", "cuda:0"), and
    `reads_on_device`: it wants all inputs on the instance's GPU, so they are brought there
    before `execute`, and those of the next request meanwhile; `batching`: how it takes what
    `dynamic_batching` has brought together.

    `chooses_device`, known before: it goes by `Context.device` itself. Else that GPU is the
    current one of CuPy and torch before `load` is called.

    An extension of the group `extensions.BACKENDS` is a class like this (or anything else that
    gives one when it is called without arguments), under the name that config.pbtxt has for it;
    the reader of that name (`repository.folder_reader`) finds its models.
    """

    @property
    def chooses_device(self) -> bool: ...

    @property
    def device(self) -> str: ...

    @property
    def reads_on_device(self) -> bool: ...

    @property
    def batching(self) -> BatchForm: ...

    def load(self, context: Context) -> ModelSpec:
        """Load the model; returns the completed spec.

        Raises:
            ShmserveError: with a reason for the repository index; anything else is
                reported as "<type>: <text>".
        """
        ...

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Run a batch: one response per request, in order; none if the model is decoupled.

        May raise: then every request of the batch gets that error.
        """
        ...

    def close(self) -> None:
        """Give everything back; called once, also after a failed load."""
        ...
