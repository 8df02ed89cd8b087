"""The native dialect of model.py: a class `Model` that reads views and writes into slots.

    class Model:
        def __init__(self, context):        # optional; context: shmserve.executor.backend.Context
            ...
        def infer(self, request):           # -> None or {"OUTPUT0": array, ...}
            x = request.input("INPUT0")                     # read-only view, no copy
            out = request.output("OUTPUT0", x.shape)        # writable, already in shared memory
            np.multiply(x, 2, out=out)
        def close(self):                    # optional
            ...

An output is either written into what `request.output` offered or returned in the dict;
a returned array is copied once (unless it is an input, or one that was offered).
`native_stream` says how decoupled models answer.

Arrays are numpy's, also of an instance on a GPU, unless the class says otherwise:

    class Model:
        device_tensors = True
        def __init__(self, context):
            self.xp = context.xp            # cupy on a GPU, else numpy
            self.weights = self.xp.asarray(...)
        def infer(self, request):
            x = request.input("INPUT0")     # on the GPU; BYTES are numpy's all the same
            self.xp.multiply(x, self.weights, out=request.output("OUTPUT0", x.shape))

Then inputs are CuPy arrays, in place if they lie in a CUDA region of that GPU, else brought
there by one DMA, and outputs are CuPy arrays that lie in the client's region or are taken out
by one DMA. On the CPU the same code gets numpy arrays. Inputs are not to be written to.
What is returned may also be anything on a GPU with `__dlpack__` or `__cuda_array_interface__`,
such as a torch tensor. Work goes to the device's default stream, where CuPy and torch work
unless they are told otherwise; what is begun need not be waited for.

A worker that takes GRPS messages (parameter `grps` of config.pbtxt is "message") looks at
`request.grps`, or at `request.http` of a request to its own HTTP path, and returns a
`shmserve.grps.Message`, or what a custom HTTP request may be answered with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmserve.errors import ConfigError, Internal
from shmserve.executor.backend import CPU, Context, Request, Response
from shmserve.executor.backends import native_messages
from shmserve.executor.backends.config_merge import with_own_tensors
from shmserve.executor.backends.model_errors import from_exception
from shmserve.executor.backends.native.instance_device import InstanceDevice
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.grps.executor.flask_request import HttpRequest
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.grps.protocol.message import GrpsMessage
from shmserve.protocol import config_json
from shmserve.protocol.control.data_messages import Parameter
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_Stream = Callable[[Any, Request, OutputCheck, InstanceDevice | None], None]


class NativeRequest:
    """One request as `Model.infer` sees it. Valid until `infer` returns."""

    __slots__ = ("_check", "_device", "_offered", "_request")

    def __init__(
        self, request: Request, check: OutputCheck, device: InstanceDevice | None = None
    ) -> None:
        """`device`: where the model wants its tensors; None: on the host."""
        self._request = request
        self._check = check
        self._device = device
        self._offered: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The client's request id, or ""."""
        return self._request.id

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The request's parameters."""
        return self._request.parameters

    @property
    def requested(self) -> tuple[str, ...]:
        """Names of the outputs that somebody wants."""
        return self._request.requested

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more; long loops may look now and then."""
        return self._request.cancelled

    @property
    def grps(self) -> GrpsMessage | None:
        """The GRPS message of a worker that takes messages; None: the request has none.

        Its tensors and binary data are views of shared memory.
        """
        return native_messages.message_of(self._request)

    @property
    def streaming(self) -> bool:
        """Whether a GRPS client asked for a stream."""
        return bool(self._request.parameters.get(grps_spec.STREAMING))

    @property
    def http(self) -> HttpRequest | None:
        """A request to the worker's own HTTP path; None: it came another way."""
        return native_messages.http_of(self._request)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that were sent (optional ones may be missing)."""
        return tuple(self._request.inputs)

    def input(self, name: str) -> Any:
        """An input as a read-only numpy array, or with `device_tensors` on a GPU as a CuPy array
        that is not to be written to; BYTES as a numpy array of `bytes`.

        Raises:
            Internal: the request has no such input.
            ResourceExhausted: the GPU has no memory left for it.
        """
        found = self._request.inputs.get(name)
        if found is None:
            raise Internal(f"the request has no input '{name}'")
        if self._device is None or found.datatype == "BYTES":
            return found.numpy()
        return self._device.input(self._request, name)

    def answer(self, result: Any, partial: bool = False, first: bool = True) -> Response:
        """What the model gave, as a response (for the server, not for models).

        Raises:
            ShmserveError: it is nothing that can be sent.
        """
        if self._check.messages:
            return native_messages.response_of(self._request, result, self._check, first)
        offered, self._offered = self._offered, {}
        named = pairs(result, offered).items()
        return Response(outputs=self._check.answer(self._request.requested, named, partial))

    def output(self, name: str, shape: Sequence[int]) -> Any:
        """A writable array, with undefined content, whose content is sent as the output: numpy's,
        or with `device_tensors` on a GPU CuPy's.

        An output that nobody requested gets ordinary memory, so a model need not ask.

        Raises:
            Internal: no such output, a shape against the configuration, or a BYTES
                output (its size is not known before its content: return it instead).
            ArenaExhausted: there is no room for it now.
            ResourceExhausted: the GPU has no memory left for it.
        """
        spec = self._check.spec(name)
        wanted = tuple(int(dim) for dim in shape)
        self._check.check_shape(spec, wanted)
        if spec.datatype == "BYTES":
            raise Internal(f"BYTES output '{name}' must be returned by infer")
        array = self._offered.get(name)
        if array is None:
            array = self._offered[name] = self._new(name, spec.datatype, wanted)
        if array.shape != wanted:
            raise Internal(f"output '{name}' was asked for with two shapes")
        return array

    def _new(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        if self._device is not None:
            return self._device.output(self._request, name, datatype, shape)
        if name in self._request.requested:
            return self._request.offer(name, datatype, shape)
        return np.empty(shape, DATATYPES[datatype].numpy)


class NativeDialect:
    """Runs a class `Model`."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._model: Any = None
        self._device: InstanceDevice | None = None
        self._stream: _Stream | None = None  # runs one request of a decoupled model

    @property
    def reads_on_device(self) -> bool:
        """Whether its inputs are wanted on the GPU."""
        return self._device is not None

    def start(self, context: Context) -> ModelSpec:
        spec = with_own_tensors(context.spec, context.directory)
        if not spec.inputs or not spec.outputs:
            raise ConfigError(f"model '{spec.name}': config.pbtxt must tell input and output")
        if not callable(getattr(self._kind, "infer", None)):
            raise ConfigError(f"model '{spec.name}': class Model has no method infer")
        config_json.require_complete(spec)
        self._check = OutputCheck(model_side(spec))
        if spec.decoupled:
            from shmserve.executor.backends.native.stream_request import stream

            self._stream = stream
        wants_device = getattr(self._kind, "device_tensors", False) and not self._check.messages
        if wants_device and context.device != CPU:
            self._device = InstanceDevice(context)
        own_init = self._kind.__init__ is not object.__init__
        self._model = self._kind(context) if own_init else self._kind()
        return spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        if self._stream is not None:
            for request in requests:
                self._run_stream(self._stream, request)
            return ()
        return [self._one(request) for request in requests]

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None and hasattr(model, "close"):
            model.close()

    def _one(self, request: Request) -> Response:
        view = NativeRequest(request, self._check, self._device)
        try:
            result = self._model.infer(view)
            return view.answer(result)
        except (Exception, SystemExit) as ex:
            return Response(error=from_exception(ex, _log, "infer failed"))

    def _run_stream(self, stream: _Stream, request: Request) -> None:
        assert request.responses is not None
        try:
            stream(self._model, request, self._check, self._device)
        except (Exception, SystemExit) as ex:
            request.responses.fail(from_exception(ex, _log, "infer failed"))


def pairs(result: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """All outputs by name: those that were offered, and those that were given.

    Raises:
        Internal: neither None nor a dict, or an output in both.
    """
    if result is None:
        return offered
    if not isinstance(result, dict):
        raise Internal(f"infer must return None or a dict, got {type(result).__name__}")
    for name, array in result.items():
        if name in offered and array is not offered[name]:
            raise Internal(f"output '{name}' was both offered and returned")
    return {**offered, **result}
