"""ONNX Runtime backend (`onnxruntime`): I/O binding on the bytes of slots.

Inputs are bound where they lie. Outputs whose shape is known beforehand are bound to the offered
slot, so the last operator writes into shared memory. The shape is known if it is fixed or its
symbols ("N") are dimensions of inputs. Other outputs stay in ONNX Runtime's memory, and the
executor copies them. On a GPU, inputs and outputs are bound in the same way in GPU memory and CUDA
regions. Strings go through `session.run`, which copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmserve.core.device_names import device_name, ordinal_of
from shmserve.errors import Code, Internal, InvalidArgument, ShmserveError
from shmserve.executor.backend import CPU, BatchForm, Context, InputTensor, Request, Response
from shmserve.executor.backends import graph_completion, import_extra
from shmserve.executor.backends.graph_completion import GraphTensor
from shmserve.executor.backends.model_errors import from_exception, from_load
from shmserve.executor.backends.onnx import cuda_provider, session
from shmserve.executor.backends.onnx.tensor_places import OnDevice, OnHost
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.tensor.dtypes import DATATYPES, object_array
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


class OnnxRuntimeBackend:
    """Runs an ONNX model."""

    chooses_device = True
    batching = BatchForm.STACKED

    def __init__(self) -> None:
        self._session: Any = None
        self._ordinal: int | None = None  # GPU of the session; None: the CPU
        self._place: OnHost | OnDevice = OnHost()

    @property
    def device(self) -> str:
        """Device on which the session computes."""
        return CPU if self._ordinal is None else device_name(self._ordinal)

    @property
    def reads_on_device(self) -> bool:
        """True if the session's tensors are on a GPU."""
        return isinstance(self._place, OnDevice)

    def load(self, context: Context) -> ModelSpec:
        spec = context.spec
        try:
            self._open(context)
            self._inputs = session.graph_tensors(self._session.get_inputs(), spec.name, "input")
            self._outputs = session.graph_tensors(self._session.get_outputs(), spec.name, "output")
            graph = self._inputs, self._outputs
            complete = graph_completion.completed(spec, context.directory, *graph)
        except Exception as ex:
            error = from_load(ex, _log, context.instance)
            raise cuda_provider.error_of(ex, ordinal_of(context.device), "model") or error from ex
        self._check = OutputCheck(model_side(complete))
        self._spec = complete
        both = [*self._inputs.values(), *self._outputs.values()]
        self._strings = any(tensor.datatype == "BYTES" for tensor in both)
        if self._ordinal is not None and not self._strings:
            self._place = OnDevice(self._ordinal)
        self._trust_symbols = True
        self._binding = self._session.io_binding()
        return complete

    def _open(self, context: Context) -> None:
        spec, ort = context.spec, import_extra("onnxruntime", "onnxruntime", "onnx")
        path = session.model_path(spec, context.directory)
        options = session.options(ort, spec, on_gpu=context.device != CPU)
        context.show_threads(options.intra_op_num_threads or session.all_cores())
        self._session, self._ordinal = cuda_provider.open_session(ort, path, options, context)
        self._run_options = session.run_options(ort, spec, self._ordinal)

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._binding = None
        self._session = None

    def _answer(self, request: Request) -> Response:
        try:
            outputs = self._run(request) if self._strings else self._bound(request)
            return Response(outputs=self._check.answer(request.requested, outputs))
        except Exception as ex:
            # the client's mistake: shapes that fit the configuration, but not each other
            wrong_input = type(ex).__name__ == "InvalidArgument" and not isinstance(
                ex, ShmserveError
            )
            code = Code.INVALID_ARGUMENT if wrong_input else Code.INTERNAL
            error = from_exception(ex, _log, "inference failed", code)
            return Response(error=self._cuda_error(ex) or error)

    def _cuda_error(self, ex: Exception) -> ShmserveError | None:
        return cuda_provider.error_of(ex, self._ordinal, "request")

    # ------------------------------------------------------------ strings

    def _run(self, request: Request) -> dict[str, np.ndarray[Any, Any]]:
        feeds = {name: _feed(request, tensor) for name, tensor in self._inputs.items()}
        names = list(request.requested)
        return dict(zip(names, self._session.run(names, feeds, self._run_options), strict=True))

    # ------------------------------------------------------------ binding

    def _bound(self, request: Request) -> dict[str, Any]:
        arrays = [self._place.input(_input(request, name)) for name in self._inputs]
        symbols = self._symbols(arrays) if self._trust_symbols else {}
        shapes = {name: _resolved(self._output(name), symbols) for name in request.requested}
        offered: dict[str, Any] = {}
        try:
            return self._bind_and_run(request, arrays, shapes, offered)
        except Exception as ex:
            fixed = {name: _resolved(self._output(name), {}) for name in shapes}
            ours = isinstance(ex, ShmserveError) or self._cuda_error(ex) is not None
            if ours or fixed == shapes:
                raise
            # If a symbol promised a wrong shape, the model works without the symbols.
            outputs = self._bind_and_run(request, arrays, fixed, offered)
            self._trust_symbols = False
            _log.warning("model '%s': symbolic dimensions do not hold", self._spec.name)
            return outputs

    def _bind_and_run(
        self,
        request: Request,
        arrays: list[Any],
        shapes: dict[str, tuple[int, ...] | None],
        offered: dict[str, Any],
    ) -> dict[str, Any]:
        binding, place = self._binding, self._place
        try:
            for tensor, array in zip(self._inputs.values(), arrays, strict=True):
                self._bind(binding.bind_input, tensor, array)
            for name, shape in shapes.items():
                tensor = self._output(name)
                if shape is None:
                    binding.bind_output(name, place.kind, place.number)
                    continue
                if name not in offered:
                    self._check.expect(name, shape)
                    offered[name] = place.offer(request, name, tensor.datatype, shape)
                self._bind(binding.bind_output, tensor, offered[name])
            place.begin()
            self._session.run_with_iobinding(binding, self._run_options)
            if None not in shapes.values():
                return offered
            values = dict(zip(shapes, binding.get_outputs(), strict=True))
            return {
                name: offered[name]
                if shape is not None
                else place.view(values[name], DATATYPES[self._output(name).datatype].numpy)
                for name, shape in shapes.items()
            }
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()

    # Inputs and offered outputs are whole row-major arrays, views of exactly their bytes
    def _bind(self, bind: Any, tensor: GraphTensor, array: Any) -> None:
        place, address = self._place, self._place.address(array)
        bind(tensor.name, place.kind, place.number, tensor.element_type, array.shape, address)

    def _output(self, name: str) -> GraphTensor:
        tensor = self._outputs.get(name)
        if tensor is None:
            raise Internal(f"the model has no output '{name}'")
        return tensor

    def _symbols(self, arrays: list[Any]) -> dict[str, int]:
        """Return the value of each symbol in the inputs' shapes. Symbols with two values are left
        out."""
        values: dict[str, int] = {}
        clash: set[str] = set()
        for tensor, array in zip(self._inputs.values(), arrays, strict=True):
            for dim, size in zip(tensor.dims, array.shape, strict=True):
                if isinstance(dim, str) and values.setdefault(dim, size) != size:
                    clash.add(dim)
        return {name: size for name, size in values.items() if name not in clash}


def _input(request: Request, name: str) -> InputTensor:
    tensor = request.inputs.get(name)
    if tensor is None:
        raise InvalidArgument(f"input '{name}' is missing")
    return tensor


def _resolved(tensor: GraphTensor, symbols: dict[str, int]) -> tuple[int, ...] | None:
    """Return the shape that an output will have, or None if the shape is unknown."""
    shape = []
    for dim in tensor.dims:
        size = symbols.get(dim) if isinstance(dim, str) else dim
        if size is None or size < 0:
            return None
        shape.append(size)
    return tuple(shape)


def _feed(request: Request, tensor: GraphTensor) -> np.ndarray[Any, Any]:
    array = _input(request, tensor.name).numpy()
    if tensor.datatype != "BYTES":
        return array
    try:
        return object_array([element.decode() for element in array.ravel()], array.shape)
    except UnicodeDecodeError:
        raise InvalidArgument(f"input '{tensor.name}' has an element that is not UTF-8") from None
