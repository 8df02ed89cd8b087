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
`stream_request` says how decoupled models answer.

With `dynamic_batching` or `sequence_batching` in config.pbtxt, a class that has

        def infer_batch(self, batch):       # as `infer`, for several requests at once
            ...

gets requests by it, those that were queued as one: each input is theirs along the first
dimension, in memory that they were copied to once, and each output is taken apart again, without
a copy if it was written into what `batch.output` offered. A class without it gets them one by one.

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

A model calls others of this server by

        answer = request.call("other", {"X": x})            # {"Y": array, ...}

Extensions may give models other requests than those with tensors (`request_forms`).
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
    """One request as `Model.infer` sees it. Valid until `infer` returns."""

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
        """Names of the outputs that somebody wants."""
        return self._request.requested

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more; long loops may look now and then."""
        return self._request.cancelled

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
        tensor = self._request.inputs.get(name)
        if tensor is None:
            raise Internal(f"the request has no input '{name}'")
        if self._device is None or not DATATYPES[tensor.datatype].cupy:
            return tensor.numpy()
        return self._device.input(self._request, name)

    def call(self, model: str, inputs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Have another model of this server work on arrays; its outputs by name. For any thread.

        Args:
            model: its name.
            inputs: arrays by input; each is copied into shared memory once.
            options: `outputs`, names of those wanted (all); `version` (the newest that is ready);
                `parameters` of the request; `timeout_s` (what this request has left).

        Returns:
            Read-only numpy arrays on the called executor's memory, which is theirs until the last
            array on it is collected; BYTES as object arrays of `bytes`.

        Raises:
            ShmserveError: the model's error, or why it could not be called. If the model does
                not catch it, it is the answer to this request.
        """
        return one_answer(self._models, self._request, model, inputs, CallOptions(**options))

    def call_stream(
        self, model: str, inputs: Mapping[str, Any], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """As `call`, but any number of answers, as they come: what decoupled models need. Leaving
        the iterator cancels the rest; `timeout_s` is for each answer."""
        return all_answers(self._models, self._request, model, inputs, CallOptions(**options))

    def answer(self, result: Any, partial: bool = False) -> Response:
        """What the model gave, as a response (for the server, not for models).

        `partial`: outputs may be missing, as in a stream.

        Raises:
            ShmserveError: it is nothing that can be sent.
        """
        offered, self._offered = self._offered, {}
        if result is None:
            given = offered
        elif isinstance(result, dict):
            for name, array in result.items():
                if name in offered and array is not offered[name]:
                    raise Internal(f"output '{name}' was both offered and returned")
            given = {**offered, **result}
        else:
            raise Internal(f"infer must return None or a dict, got {type(result).__name__}")
        return Response(outputs=self._check.answer(self._request.requested, given, partial))

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
        wanted = tuple(map(int, shape))
        spec = self._check.expect(name, wanted)
        array = self._offered.get(name)
        if array is not None:
            if array.shape != wanted:
                raise Internal(f"output '{name}' was asked for with two shapes")
            return array
        if spec.datatype == "BYTES":
            raise Internal(f"BYTES output '{name}' must be returned by infer")
        request, datatype = self._request, spec.datatype
        if self._device is not None:
            array = self._device.output(request, name, datatype, wanted)
        elif name in request.requested:
            array = request.offer(name, datatype, wanted)
        else:
            array = np.empty(wanted, DATATYPES[datatype].numpy)
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
        """Whether it takes several requests as one."""
        return BatchForm.STACKED if self._takes_batches else BatchForm.ALONE

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
        """What the model is given for a request."""
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
        except (Exception, SystemExit) as ex:
            return Response(error=without_frames(from_exception(ex, _log, "infer failed")))
        return response
