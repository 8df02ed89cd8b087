"""Run a backend without an executor: requests in plain numpy memory.

    backend, spec = load(ModelFolder_or_directory)
    response = ask(backend, spec, INPUT0=np.zeros(4, np.float32))

For a decoupled model, use `ask_stream`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shmserve import repository
from shmserve.core.device_names import ordinal_of
from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.cuda import runtime
from shmserve.errors import Internal, ProtocolViolation, ShmserveError
from shmserve.executor import backends
from shmserve.executor.backend import CPU, Backend, Context, Output, Response, Responses
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.executor.custom_metrics import CustomMetrics
from shmserve.executor.process.model_loading import warm_up
from shmserve.executor.wrappers import ragged
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.tensor.dtypes import DATATYPES, from_numpy
from shmserve.tensor.spec import ModelSpec


class FakeInput:
    device = CPU

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        datatype = from_numpy(array.dtype)
        assert datatype is not None
        self.name = name
        self.datatype = datatype.name
        self.shape = tuple(array.shape)
        if datatype.itemsize:
            self.memory = array.copy()
            self.memory.setflags(write=False)
            self.buffer = self.memory.reshape(-1).view(np.uint8).data
        else:
            self.memory = array
            self.buffer = memoryview(b"")

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.memory.view() if DATATYPES[self.datatype].itemsize else self.memory.copy()

    def private(self) -> np.ndarray[Any, Any]:
        return self.memory.copy()

    def on_device(self) -> Any:
        return runtime.cupy().asarray(self.memory)

    private_on_device = on_device


class FakeDeviceInput:
    """An input in a GPU's memory: a CuPy array, as if in a client's region."""

    def __init__(self, name: str, array: Any) -> None:
        datatype = from_numpy(array.dtype)
        assert datatype is not None
        self.name = name
        self.datatype = datatype.name
        self.shape = tuple(array.shape)
        self.device = f"cuda:{array.device.id}"
        self.memory = array

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.memory.tobytes())

    def numpy(self) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = self.memory.get()
        host.setflags(write=False)
        return host

    def private(self) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = self.memory.get()
        return host

    def on_device(self) -> Any:
        return self.memory

    def private_on_device(self) -> Any:
        return self.memory.copy()


class FakeResponses:
    """Collector of a decoupled model's answers. The last answer sets `ended`."""

    def __init__(self) -> None:
        self.sent: list[Response] = []
        self.errors: list[ShmserveError] = []  # errors of the stream; answers have their own
        self.ended = threading.Event()

    def send(self, response: Response | None, final: bool = False) -> None:
        if self.ended.is_set():
            raise ProtocolViolation("FINISH of a stream that is CLOSED")
        if response is not None:
            self.sent.append(response)
        if final:
            self.ended.set()

    def fail(self, error: ShmserveError) -> None:
        if not self.ended.is_set():
            self.errors.append(error)
            self.ended.set()

    def abandoned(self) -> None:
        self.fail(Internal("abandoned"))


class FakeBackendRequest:
    """A request with ordinary arrays as memory: `offered` has the offered outputs by name.

    `arrays` are the inputs, from numpy or CuPy.
    """

    def __init__(
        self,
        requested: tuple[str, ...],
        parameters: dict[str, Parameter] | None = None,
        responses: Responses | None = None,
        **arrays: Any,
    ) -> None:
        self.id = "request-1"
        self.parameters: dict[str, Parameter] = parameters or {}
        self.inputs: dict[str, Any] = {
            name: FakeInput(name, array)
            if isinstance(array, np.ndarray)
            else FakeDeviceInput(name, array)
            for name, array in arrays.items()
        }
        self.requested = requested
        self.deadline_ns = 0
        self.callers: tuple[CallingModel, ...] = ()
        self.traceparent = ""
        self.sequence: SequenceName | None = None
        self.cancelled = False
        self.responses = responses
        self.rescheduled = False
        self.offered: dict[str, Any] = {}

    def reschedule(self, again: bool) -> None:
        self.rescheduled = again

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        assert name not in self.offered or self.responses is not None, "offered twice"
        array = self.offered[name] = np.full(shape, 77, DATATYPES[datatype].numpy)
        return array

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        self.offered[name] = runtime.cupy().empty(shape, DATATYPES[datatype].numpy)
        return self.offered[name]


def load(
    directory: str,
    device: str = CPU,
    auto: bool = False,
    models: OtherModels = NO_MODELS,
    allow_model_code: bool = False,
) -> tuple[Backend, ModelSpec]:
    """Load the newest version of a model's folder, as an executor of an instance on `device` does.

    `auto`, `models` and `allow_model_code` are as in `Context`.
    """
    folder = repository.read_folder(directory)
    spec = folder.specs[-1]
    instance = f"{spec.name}/{spec.version}/0"
    metrics = CustomMetrics()  # of this model alone: one process may load several
    context = Context(
        spec, folder.directory, instance, device, auto, models, metrics,
        allow_model_code=allow_model_code,
    )  # fmt: skip
    ordinal = ordinal_of(device)
    if ordinal is not None:
        runtime.cupy().cuda.Device(ordinal).use()
    backend, spec = ragged.load(backends.create(spec), context)
    warm_up(backend, spec, context)
    return backend, spec


def ask(
    backend: Backend,
    spec: ModelSpec,
    requested: tuple[str, ...] = (),
    parameters: dict[str, Parameter] | None = None,
    **arrays: Any,
) -> Response:
    """Run one request. All outputs are requested if `requested` is empty."""
    names = requested or tuple(output.name for output in spec.outputs)
    return backend.execute([FakeBackendRequest(names, parameters, **arrays)])[0]


def ask_stream(
    backend: Backend, spec: ModelSpec, parameters: dict[str, Parameter] | None = None, **arrays: Any
) -> FakeResponses:
    """Run one request of a decoupled model. Wait for `ended` before reading the answers."""
    names = tuple(output.name for output in spec.outputs)
    responses = FakeResponses()
    assert not backend.execute([FakeBackendRequest(names, parameters, responses, **arrays)])
    return responses


def arrays(response: Response) -> dict[str, Any]:
    """Return a response's outputs by name, or raise the response's error."""
    if response.error is not None:
        raise response.error
    outputs: tuple[Output, ...] = response.outputs
    return {output.name: output.array for output in outputs}


def failure(response: Response) -> ShmserveError:
    assert response.error is not None
    return response.error
