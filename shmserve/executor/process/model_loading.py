"""Loading of a model instance: device, code and warm-up, in this order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.errors import ConfigError, Internal, ShmserveError
from shmserve.executor import backends
from shmserve.executor.backend import CPU, Backend, Context, Response, Responses
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.memory_input import MemoryInput, from_data, zeros
from shmserve.executor.wrappers import ragged
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config import model_config
from shmserve.protocol.triton_config.warmup_samples import WarmupInput, WarmupSample
from shmserve.repository import folder_reader
from shmserve.tensor.dtypes import DATATYPES, object_array
from shmserve.tensor.spec import ModelSpec, fits

log = logging.getLogger(__name__)

_FOLDER = "warmup"
_SEED = 0  # fixed, so a model that fails on a random sample fails on the next start, too
_TEXT_BYTES = 8


def load(
    instance: Instance,
    devices: Devices,
    models: OtherModels = NO_MODELS,
    show_threads: Callable[[int], None] = lambda _: None,
    allow_model_code: bool = False,
) -> tuple[Backend, ModelSpec]:
    """Load and warm up the model of an instance. Return the backend and the completed spec. Raise
    the cause of a failure; nothing is left behind. `show_threads`, `allow_model_code`: of the
    `Context`."""
    backend = backends.create(instance.spec)
    context = _context(instance, devices, models, backend.chooses_device)
    context = msgspec.structs.replace(
        context, show_threads=show_threads, allow_model_code=allow_model_code
    )
    backend, spec = ragged.load(backend, context)
    try:
        if backend.device == CPU:  # also the case if the backend could not use the instance's GPU
            devices.stay_on_cpu()
            context = msgspec.structs.replace(context, device=CPU)
        else:
            devices.open()
        warm_up(backend, spec, context)
        failed = devices.settle()  # errors on a device show only in a wait for the device
        if failed is not None:
            raise failed
    except BaseException:
        backend.close()
        raise
    return backend, spec


def _context(
    instance: Instance, devices: Devices, models: OtherModels, backend_chooses: bool
) -> Context:
    """Return the backend's context. Unless the backend chooses the device itself, open the device
    before the model's code runs: CuPy and torch then use that device by default."""
    spec = instance.spec
    device = CPU if devices.ordinal is None else f"cuda:{devices.ordinal}"
    context = Context(spec, instance.directory, instance.name, device, instance.auto, models)
    if devices.ordinal is None or backend_chooses:
        return context
    try:
        devices.open().choose()
    except ConfigError as ex:
        if not instance.auto:
            raise
        log.info("runs on the CPU: %s", ex.message)
        devices.stay_on_cpu()
        return msgspec.structs.replace(context, device=CPU)
    return context


class _WarmupResponses:
    """Receiver of a stream's responses, which looks for errors; implements `backend.Responses`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: ShmserveError | None = None

    def send(self, response: Response | None, final: bool = False) -> None:
        if response is not None and response.error is not None:
            self._error = self._error or response.error
        if final:
            self._ended.set()

    def fail(self, error: ShmserveError) -> None:
        if not self._ended.is_set():
            self._error = self._error or error
            self._ended.set()

    def abandoned(self) -> None:
        self.fail(Internal("the model let go of the request without sending its final response"))

    def wait(self) -> Response:
        """Return the result once the stream has ended. A stream without end is ended by the
        deadline of the load."""
        self._ended.wait()
        return self.so_far()

    def so_far(self) -> Response:
        return Response(error=self._error)


class _WarmupRequest(Struct, eq=False):
    """A request without a client; implements `backend.Request`."""

    id: str
    inputs: dict[str, Any]
    requested: tuple[str, ...]
    responses: Responses | None
    _xp: Any
    parameters: dict[str, Parameter] = {}
    cancelled: bool = False
    rescheduled: bool = False
    deadline_ns: int = 0
    callers: tuple[CallingModel, ...] = ()
    traceparent: str = ""
    sequence: SequenceName | None = None

    def reschedule(self, again: bool) -> None:
        """Record that the model wants another run. A sample runs once nevertheless."""
        self.rescheduled = again

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.empty(shape, DATATYPES[datatype].numpy)

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        return self._xp.empty(shape, DATATYPES[datatype].numpy)


def warm_up(backend: Backend, spec: ModelSpec, context: Context) -> None:
    """Run every sample as often as its `count` says. Raise ConfigError if a sample does not fit the
    model, or its file is wrong. Raise ShmserveError if the model failed on a sample."""
    config = model_config.of_spec(spec, folder_reader.kinds())
    requested = tuple(output.name for output in spec.outputs)
    for sample in config.warmup:
        started = time.monotonic()
        inputs = {tensor.name: _input(tensor, spec, context, sample) for tensor in sample.inputs}
        missing = [t.name for t in spec.inputs if not t.optional and t.name not in inputs]
        if missing:
            raise ConfigError(f"{_where(spec, sample)}: input '{missing[0]}' is missing")
        for _ in range(sample.count):
            responses = _WarmupResponses() if spec.decoupled else None
            name = f"warmup {sample.name}"
            request = _WarmupRequest(name, inputs, requested, responses, context.xp)
            answers = backend.execute([request])
            if responses is None:
                response = answers[0]
            elif request.rescheduled:  # the end of the stream would come in a later run
                response = responses.so_far()
            else:
                response = responses.wait()
            if response.error is not None:
                raise type(response.error)(f"{_where(spec, sample)}: {response.error.message}")
        log.info("warmed up with '%s' in %.2f s", sample.name, time.monotonic() - started)


def _where(spec: ModelSpec, sample: WarmupSample) -> str:
    return f"model '{spec.name}': model_warmup '{sample.name}'"


def _input(
    tensor: WarmupInput, spec: ModelSpec, context: Context, sample: WarmupSample
) -> MemoryInput:
    where = f"{_where(spec, sample)}: input '{tensor.name}'"
    expected = spec.input(tensor.name)
    if expected is None:
        raise ConfigError(f"{where}: the model has no such input")
    if expected.datatype != tensor.datatype:
        raise ConfigError(f"{where} is {tensor.datatype}, the model's is {expected.datatype}")
    if not fits(expected.shape, tensor.shape):
        raise ConfigError(
            f"{where} has shape {list(tensor.shape)}, the model's is {list(expected.shape)}"
        )
    if tensor.source == "file":
        try:
            with open(os.path.join(context.directory, _FOLDER, tensor.file), "rb") as file:
                data = file.read()
        except OSError as ex:
            text = f"input_data_file '{tensor.file}' cannot be read ({ex.strerror})"
            raise ConfigError(f"{where}: {text}") from None
        where = f"{where}: input_data_file '{tensor.file}'"
        array = from_data(data, tensor.name, tensor.datatype, tensor.shape, spec.name, where)
    else:
        array = _values(tensor)
    return MemoryInput(tensor.name, tensor.datatype, array, context.xp)


def _values(tensor: WarmupInput) -> np.ndarray[Any, Any]:
    dtype = DATATYPES[tensor.datatype].numpy
    random = np.random.default_rng(_SEED)
    if tensor.source == "zero":
        return zeros(tensor.datatype, tensor.shape)
    if tensor.datatype == "BYTES":
        texts = [random.bytes(_TEXT_BYTES).hex().encode() for _ in range(prod(tensor.shape))]
        return object_array(texts, tensor.shape)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return random.integers(bounds.min, bounds.max, tensor.shape, dtype, endpoint=True)
    if dtype.kind == "b":
        return random.random(tensor.shape) < 0.5
    return random.random(tensor.shape, np.float32).astype(dtype)
