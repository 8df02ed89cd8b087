"""Backend interface: the seam between the executor's loop and the code that runs a model.

A backend lives in `shmserve.executor.backends` and knows nothing of slots, sockets or messages. It
gets `Request`s, whose inputs are read-only views, and returns a response for each. Where the bytes
of a tensor lie, and on which device, is the business of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, field

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.errors import ConfigError, Internal, InvalidArgument, ShmserveError
from shmserve.executor import custom_metrics
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.executor.custom_metrics import CustomMetrics
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import ModelSpec

CPU = "cpu"


class BatchForm(Enum):
    """The form in which a backend takes several requests that were queued for one model."""

    ALONE = 0  # no batches: the requests run one by one
    LISTED = 1  # `execute` gets the requests as a list
    STACKED = 2  # `execute` gets one request, whose tensors are the joined tensors of all requests


class InputTensor(Protocol):
    """An input of a request.

    Attributes:
        device: where the bytes lie: "cpu", or for example "cuda:0".
        buffer: read-only view of exactly the bytes of the tensor in shared memory; a copy in host
            memory if the bytes lie on a GPU.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    device: str

    @property
    def buffer(self) -> memoryview: ...

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a read-only array of `shape`. BYTES is copied, then parsed, into an object array
        of `bytes`."""
        ...

    def private(self) -> np.ndarray[Any, Any]:
        """Return a writable copy, for a model that writes into its inputs. The copy is counted."""
        ...

    def on_device(self) -> Any:
        """Return a CuPy array of `shape` on the instance's device.

        The array is the client's own memory, which must not be written to, if that memory lies on
        the device. Otherwise the array is a copy, made once and counted.

        Raises:
            Internal: the tensor is of type BYTES.
            ResourceExhausted: the device has no memory left.
        """
        ...

    def private_on_device(self) -> Any:
        """Return a CuPy array that the model may write into, never the client's memory. Raises as
        `on_device`."""
        ...


class Responses(Protocol):
    """Sender of the answers to one request of a decoupled model; for any thread of the model."""

    def send(self, response: Response | None, final: bool = False) -> None:
        """Send an answer, and end the stream if `final` is set. Without a response, only end the
        stream.

        Wait while the client is behind. Once the client has gone, the request is `cancelled` and
        answers are dropped. An answer that cannot be sent is replaced by the error.

        Raises:
            ProtocolViolation: `final` was sent before.
        """
        ...

    def fail(self, error: ShmserveError) -> None:
        """End the stream with an error, unless it has ended; later answers are dropped."""
        ...

    def abandoned(self) -> None:
        """Note that the model has dropped all references to this sender: an open stream ends with
        an error. Safe in finalizers."""
        ...


class Request(Protocol):
    """A request, as a backend sees it."""

    id: str
    parameters: dict[str, Parameter]
    requested: tuple[str, ...]  # names of the requested outputs, never empty
    deadline_ns: int  # CLOCK_MONOTONIC; 0: no deadline
    callers: tuple[CallingModel, ...]  # models that wait for the answer
    traceparent: str  # parent span of the model's own work (W3C Trace Context); empty: no trace
    sequence: SequenceName | None  # sequence that the client named; the parameters have its id
    responses: Responses | None  # set for decoupled models; None: `execute` returns the answer
    rescheduled: bool  # the request is to run again: see `reschedule`

    def reschedule(self, again: bool) -> None:
        """Decide, before `execute` returns, whether the request runs once more in a later batch.
        The response to a run that is to be repeated may hold states only. For models of
        iterative sequences."""
        ...

    @property
    def inputs(self) -> Mapping[str, InputTensor]:
        """Return the inputs by name, in the order of the request."""
        ...

    @property
    def cancelled(self) -> bool:
        """Return True once no client waits for the answer."""
        ...

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a writable array in the output slot itself, so that the output needs no copy. Not
        for BYTES.

        Raises:
            ArenaExhausted: the pool has no room for the output.
        """
        ...

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """Return a CuPy array on the instance's device to be given as the output. Not for BYTES.

        The array is the client's own memory if the output goes there. Otherwise the array is
        copied out once, and counted.

        Raises:
            ResourceExhausted: the device has no memory left.
        """
        ...


class Output(Struct, frozen=True):
    """An output of a response.

    Attributes:
        array: numpy or CuPy array of any layout; BYTES as an object array of bytes or str. Kernels
            that fill a CuPy array may still be running.
    """

    name: str
    datatype: str
    array: Any

    def elements(self) -> list[bytes]:
        """Return the elements of a BYTES output. Raise Internal for elements that are neither bytes
        nor Unicode text."""
        try:
            return bytes_codec.to_bytes(self.array.ravel().tolist())
        except InvalidArgument as ex:
            raise Internal(f"output '{self.name}': {ex.message}") from None
        except (TypeError, AttributeError):
            raise Internal(f"output '{self.name}' has an element that is no bytes or str") from None


class Response(Struct, frozen=True):
    """The answer to one request: outputs, or an error.

    Attributes:
        copied: number of bytes that the backend itself has copied into offered outputs, for the
            receipt.
    """

    outputs: tuple[Output, ...] = ()
    error: ShmserveError | None = None
    parameters: dict[str, Parameter] = {}
    copied: int = 0


class Context(Struct, frozen=True):
    """Argument of `Backend.load`: the instance to load, the server's other models, and custom
    metrics."""

    spec: ModelSpec  # inputs and outputs may be empty: the backend completes them
    directory: str  # the model's folder; the version's folder is `directory`/`version`
    instance: str  # e.g. "digits/1/0"
    device: str  # "cpu" or "cuda:0", numbered as CUDA numbers devices in this process
    auto: bool = False  # a backend that cannot use the device may run on the CPU instead
    models: OtherModels = NO_MODELS  # the server's other models
    metrics: CustomMetrics = field(default_factory=lambda: custom_metrics.registry)
    # Called by a backend that chooses the threads of its runs, with their number
    show_threads: Callable[[int], None] = lambda _: None
    allow_model_code: bool = False  # the setting of the same name: see `require_model_code`

    def require_model_code(self, reason: str) -> None:
        """Raise ConfigError if the service does not let model files bring code. `reason`: how a
        file brings code, as the beginning of the error's sentence."""
        if not self.allow_model_code:
            raise ConfigError(
                f"model '{self.spec.name}': {reason}: the setting allow_model_code must be true"
            )

    @property
    def xp(self) -> Any:
        """Return the array module of the device: cupy on a GPU, numpy on the CPU."""
        if self.device == CPU:
            return np
        from shmserve.cuda import runtime

        return runtime.cupy()


class Backend(Protocol):
    """A model instance in a process of its own. Only the main thread calls a backend.

    An extension of the group `extensions.BACKENDS` is a class like this one, or any callable
    without arguments that returns an instance. The name of the extension is the backend's name in
    config.pbtxt. The folder reader of this name (`repository.folder_reader`) finds the models.

    Attributes:
        chooses_device: the backend itself acts on `Context.device`; known before `load`.
            Otherwise, that GPU is made the current device of CuPy and torch before `load` is
            called.
        device: where the model computes ("cpu", "cuda:0"); known once the model is loaded.
        reads_on_device: all inputs are to be on the instance's GPU before `execute`, and are
            brought there while the request before runs; known once the model is loaded.
        batching: form in which the backend takes the requests that `dynamic_batching` has
            gathered; known once the model is loaded.
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
        """Load the model and return the completed spec.

        Raises:
            ShmserveError: the model cannot be loaded; the text is shown in the repository index.
                Any other exception is shown as "<type>: <text>".
        """
        ...

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Run a batch. Return one response per request, in order, or none if the model is
        decoupled.

        May raise: every request of the batch then gets this error.
        """
        ...

    def close(self) -> None:
        """Release everything that the backend holds. Called once, also after a failed load."""
        ...
