"""Native dialect of model.py: a class `Model` that reads views and writes into slots.

    class Model:
        def __init__(self, context):        # optional; context: shmserve.executor.backend.Context
            ...
        def infer(self, request):           # -> None or {"OUTPUT0": array, ...}
            x = request.input("INPUT0")                     # read-only view, no copy
            out = request.output("OUTPUT0", x.shape)        # writable, already in shared memory
            np.multiply(x, 2, out=out)
        def close(self):                    # optional
            ...

An output is either written into the array from `request.output` or returned in the dict. A
returned array is copied once, unless it is an input or came from `request.output`.
`stream_dialect` describes how decoupled models answer.

With `dynamic_batching` or `sequence_batching` in config.pbtxt, a class may have

        def infer_batch(self, batch):       # as `infer`, for several requests at once
            ...

`infer_batch` gets the requests of a batch as one: each input holds the inputs of all requests
along the first dimension, in memory that they were copied to once. Each output is split again,
without a copy if it was written into an array from `batch.output`. A class without `infer_batch`
gets the requests one by one.

Arrays are numpy arrays, also on a GPU instance, unless the class asks for device tensors:

    class Model:
        device_tensors = True
        def __init__(self, context):
            self.xp = context.xp            # cupy on a GPU, else numpy
            self.weights = self.xp.asarray(...)
        def infer(self, request):
            x = request.input("INPUT0")     # on the GPU; BYTES stay numpy arrays
            self.xp.multiply(x, self.weights, out=request.output("OUTPUT0", x.shape))

Then inputs are CuPy arrays: in place if they lie in a CUDA region of the GPU, else brought there
by one DMA. Outputs are CuPy arrays that lie in the client's region or are copied out by one DMA.
On the CPU the same code gets numpy arrays. The model must not write to inputs. A returned value
may also be any GPU object with `__dlpack__` or `__cuda_array_interface__`, such as a torch tensor.
The server uses the device's default stream, as CuPy and torch do by default, so the model need not
wait for work on this stream.

A model calls other models of this server by

        answer = request.call("other", {"X": x})            # {"Y": array, ...}

Extensions may give models other requests than tensor requests (`request_forms`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from shmserve.errors import ConfigError, Internal
from shmserve.executor.backend import CPU, BatchForm, Context, Request, Response
from shmserve.executor.backends.config_merge import with_own_tensors
from shmserve.executor.backends.model_errors import from_exception, without_frames
from shmserve.executor.backends.native.instance_device import InstanceDevice
from shmserve.executor.backends.native.other_models import CallOptions, all_answers, one_answer
from shmserve.executor.backends.native.request_forms import RequestForm, form_of
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.triton_config import document
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


class NativeRequest:
    """Request as `Model.infer` sees it. Valid until `infer` returns."""

    __slots__ = ("_check", "_device", "_first", "_models", "_offered", "_request")

    def __init__(
        self,
        request: Request,
        check: OutputCheck,
        device: InstanceDevice | None = None,
        models: OtherModels = NO_MODELS,
    ) -> None:
        """`device`: where the model wants its tensors; None: on the host."""
        self._request = request
        self._check = check
        self._device = device
        self._models = models
        self._offered: dict[str, Any] = {}
        self._first = True  # no answer has been made yet

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
        """Names of the outputs that the client wants."""
        return self._request.requested

    @property
    def cancelled(self) -> bool:
        """True if the answer is no longer wanted. Long loops may check this now and then."""
        return self._request.cancelled

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that were sent. Optional inputs may be missing."""
        return tuple(self._request.inputs)

    def input(self, name: str) -> Any:
        """Return an input as a read-only numpy array. With `device_tensors` on a GPU, return a
        CuPy array, which the model must not write to. BYTES are always numpy arrays of `bytes`.

        Raises:
            Internal: the request has no such input.
            ResourceExhausted: the GPU has no memory left for the input.
        """
        tensor = self._request.inputs.get(name)
        if tensor is None:
            raise Internal(f"the request has no input '{name}'")
        if self._device is None or not DATATYPES[tensor.datatype].cupy:
            return tensor.numpy()
        return self._device.input(self._request, name)

    def call(self, model: str, inputs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Call another model of this server with arrays, and return its outputs by name. For any
        thread.

        Args:
            model: name of the model.
            inputs: arrays by input; each is copied into shared memory once.
            options: `outputs`, names of requested outputs (default: all); `version` (default: the
                newest ready version); `parameters` of the request; `timeout_s`, in seconds
                (default: the time that this request has left).

        Returns:
            Read-only numpy arrays on memory of the called executor, which is released when the
            last array is collected; BYTES as object arrays of `bytes`.

        Raises:
            ShmserveError: error of the called model, or of the call itself. An error that the
                model does not catch becomes the answer to this request.
        """
        return one_answer(self._models, self._request, model, inputs, CallOptions(**options))

    def call_stream(
        self, model: str, inputs: Mapping[str, Any], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Call a model as `call` does, and yield any number of answers as they come, as decoupled
        models need. Leaving the iterator cancels the rest. `timeout_s` applies to each answer."""
        return all_answers(self._models, self._request, model, inputs, CallOptions(**options))

    def answer(self, result: Any, partial: bool = False) -> Response:
        """Return the model's result as a response (for the server, not for models).

        `partial`: True if outputs may be missing, as in a stream.
        """
        offered, self._offered = self._offered, {}
        if result is None:
            outputs = offered
        elif isinstance(result, dict):
            for name, array in result.items():
                if name in offered and array is not offered[name]:
                    raise Internal(f"output '{name}' was both offered and returned")
            outputs = {**offered, **result}
        else:
            raise Internal(f"infer must return None or a dict, got {type(result).__name__}")
        return Response(outputs=self._check.answer(self._request.requested, outputs, partial))

    def output(self, name: str, shape: Sequence[int]) -> Any:
        """Return a writable array whose content is sent as the output. The initial content is
        undefined. The array is a numpy array, or a CuPy array with `device_tensors` on a GPU.

        An output that was not requested gets ordinary memory, so a model need not check for it.

        Raises:
            Internal: no such output, a shape against the configuration, or a BYTES output, whose
                size is unknown in advance (return it instead).
            ArenaExhausted: shared memory has no room for the output now.
            ResourceExhausted: the GPU has no memory left for the output.
        """
        dims = tuple(map(int, shape))
        spec = self._check.expect(name, dims)
        array = self._offered.get(name)
        if array is not None:
            if array.shape != dims:
                raise Internal(f"output '{name}' was asked for with two shapes")
            return array
        if spec.datatype == "BYTES":
            raise Internal(f"BYTES output '{name}' must be returned by infer")
        request, datatype = self._request, spec.datatype
        if self._device is not None:
            array = self._device.output(request, name, datatype, dims)
        elif name in request.requested:
            array = request.offer(name, datatype, dims)
        else:
            array = np.empty(dims, DATATYPES[datatype].numpy)
        self._offered[name] = array
        return array


class NativeDialect:
    """Runs a class `Model` that gives one answer to each request."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._model: Any = None
        self._device: InstanceDevice | None = None
        self._takes_batches = False

    @property
    def batching(self) -> BatchForm:
        """STACKED if the model takes several requests as one, else ALONE."""
        return BatchForm.STACKED if self._takes_batches else BatchForm.ALONE

    @property
    def reads_on_device(self) -> bool:
        """True if the model wants its inputs on the GPU."""
        return self._device is not None

    def start(self, context: Context) -> ModelSpec:
        spec = with_own_tensors(context.spec, context.directory)
        if not spec.inputs or not spec.outputs:
            raise ConfigError(f"model '{spec.name}': config.pbtxt must tell input and output")
        if not callable(getattr(self._kind, "infer", None)):
            raise ConfigError(f"model '{spec.name}': class Model has no method infer")
        document.require_complete(spec)
        self._check = OutputCheck(model_side(spec))
        self._models = context.models
        form = form_of(spec)
        self._request = self._request_class(form)
        wants_device = getattr(self._kind, "device_tensors", False) and form is None
        if wants_device and context.device != CPU:
            self._device = InstanceDevice(context)
        own_init = self._kind.__init__ is not object.__init__
        self._model = self._kind(context) if own_init else self._kind()
        schedulers = (spec.config.dynamic_batching, spec.config.sequence_batching)
        batches = schedulers != (UNSET, UNSET) and spec.max_batch_size > 0
        is_able = callable(getattr(self._kind, "infer_batch", None)) and form is None
        self._takes_batches = batches and is_able
        self._infer = self._model.infer_batch if self._takes_batches else self._model.infer
        return spec

    def _request_class(self, form: RequestForm | None) -> type[Any]:
        """Return the class of requests that the model gets."""
        return NativeRequest if form is None else form.request

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        return list(map(self._answer, requests))

    def close(self) -> None:
        model, self._model, self._infer = self._model, None, None
        if model is not None and hasattr(model, "close"):
            model.close()

    def _answer(self, request: Request) -> Response:
        view = self._request(request, self._check, self._device, self._models)
        try:
            result = self._infer(view)
            response: Response = view.answer(result)
        except BaseException as ex:
            return Response(error=without_frames(from_exception(ex, _log, "infer failed")))
        return response
