"""Base of backends for models with a matrix as input, a row for each sample.

Names and shapes are MLServer's: an input with the configuration's name (default: `predict`), the
output `predict` and, for some models, `predict_proba`, with a row for each sample. The model tells
the number of columns. A trial with rows of zeros tells the types and shapes of the outputs.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from shmserve.errors import Code, ConfigError, InvalidArgument
from shmserve.executor.backend import CPU, BatchForm, Context, Request, Response
from shmserve.executor.backends import graph_completion
from shmserve.executor.backends.graph_completion import GraphTensor
from shmserve.executor.backends.model_errors import describe, from_exception, from_load
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.protocol.triton_config import model_config
from shmserve.repository import folder_reader, read_labels
from shmserve.tensor.config_document import InputEntry
from shmserve.tensor.dtypes import BY_CONFIG_NAME, DATATYPES, from_numpy, object_array
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)
_TRIAL_ROWS = 2

Matrix = np.ndarray[Any, Any]
Methods = dict[str, Callable[[Matrix], Any]]  # functions by output


class MatrixBackend(ABC):
    """Runs a model on the CPU."""

    chooses_device = True
    device = CPU
    reads_on_device = False
    batching = BatchForm.STACKED
    default_input = InputEntry("predict", "TYPE_FP32")

    def __init__(self) -> None:
        self._methods: Methods = {}

    @abstractmethod
    def open_model(self, path: str, context: Context) -> tuple[Methods, int | None]:
        """Load a file. Return the model's methods by output, and the number of columns, or None if
        unknown. May raise anything."""

    def load(self, context: Context) -> ModelSpec:
        spec = context.spec
        try:
            folder = folder_reader.version_folder(context.directory, spec.version)
            path = os.path.join(folder, spec.config.model_file)
            self._methods, columns = self.open_model(path, context)
            complete = self._completed(spec, context.directory, columns)
        except Exception as ex:
            raise from_load(ex, _log, context.instance) from ex
        self._check = OutputCheck(model_side(complete))
        return complete

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._methods = {}

    def _answer(self, request: Request) -> Response:
        try:
            (source,) = request.inputs.values()
            matrix = _values(source.numpy())
            if not len(matrix):  # libraries fail, or tell other shapes
                raise InvalidArgument("the input has no rows")
            given = {name: _rows(self._methods[name](matrix)) for name in request.requested}
            return Response(outputs=self._check.answer(request.requested, given))
        except Exception as ex:
            # Libraries refuse values, such as NaN, with a ValueError
            code = Code.INVALID_ARGUMENT if isinstance(ex, ValueError) else Code.INTERNAL
            return Response(error=from_exception(ex, _log, "inference failed", code))

    def _completed(self, spec: ModelSpec, directory: str, columns: int | None) -> ModelSpec:
        """Return the spec with the tensors of the model. Raise ConfigError if configuration and
        model disagree, or neither tells the tensors."""
        if len(spec.config.input) > 1:
            raise ConfigError(
                f"model '{spec.name}': backend '{spec.backend}' takes one input, the configuration"
                f" has {len(spec.config.input)}"
            )
        entry = spec.config.input[0] if spec.config.input else self.default_input
        if entry.data_type == "TYPE_INVALID":
            entry = replace(entry, data_type=self.default_input.data_type)
        if not entry.dims:
            entry = replace(entry, dims=self.input_dims(spec, columns))
        spec = replace(spec, config=replace(spec.config, input=(entry,)))
        datatype = BY_CONFIG_NAME[entry.data_type].name
        dims = (_TRIAL_ROWS, columns) if columns else _trial_shape(entry, spec.max_batch_size)
        outputs = self.tried(spec, _zeros(datatype, dims))
        if outputs is None:
            return self._described(spec, directory)
        rest: tuple[int | None, ...] = dims[1:] if columns else (None,) * len(dims[1:])
        inputs = {entry.name: GraphTensor(entry.name, datatype, 0, ("rows", *rest))}
        return graph_completion.completed(spec, directory, inputs, outputs)

    def _described(self, spec: ModelSpec, directory: str) -> ModelSpec:
        """Return the spec of a configuration with all tensors. Raise ConfigError for an unknown
        output."""
        for output in spec.outputs:
            if output.name not in self._methods:
                raise ConfigError(
                    f"model '{spec.name}': output '{output.name}' is none of the model's:"
                    f" {', '.join(self._methods)}"
                )
        config = model_config.of_spec(spec, folder_reader.kinds())
        return config.spec(spec.version, read_labels(config, directory))

    def input_dims(self, spec: ModelSpec, columns: int | None) -> tuple[int, ...]:
        """Return the dims of the input: without batches, requests have any number of rows. Raise
        ConfigError if the model does not tell the number of columns."""
        if columns is None:
            raise ConfigError(
                f"model '{spec.name}': input: dims is missing, and the model does not tell its"
                " number of columns"
            )
        return (columns,) if spec.max_batch_size else (-1, columns)

    def tried(self, spec: ModelSpec, matrix: Matrix) -> dict[str, GraphTensor] | None:
        """Return the outputs for a matrix. Return None if the model does not take the matrix, and
        the configuration describes all tensors. Raise ConfigError if the configuration does not."""
        tensors = {}
        try:
            for name, method in self._methods.items():
                result = method(_values(matrix))
                array = _rows(result)
                datatype = from_numpy(array.dtype)
                if datatype is not None and not isinstance(result, list):
                    tensors[name] = GraphTensor(name, datatype.name, 0, ("rows", *array.shape[1:]))
        except Exception as ex:
            _log.info("a trial with zeros failed", exc_info=ex)
            if spec.outputs and len(spec.outputs) == len(spec.config.output):
                return None
            raise ConfigError(
                f"model '{spec.name}': a trial with zeros failed ({describe(ex)}): write data_type"
                " and dims of its input and outputs into config.pbtxt"
            ) from None
        return tensors


def _trial_shape(entry: InputEntry, max_batch_size: int) -> tuple[int, ...]:
    rest = entry.dims if max_batch_size else entry.dims[1:]
    return (_TRIAL_ROWS, *(1 if dim < 0 else dim for dim in rest))


def _zeros(datatype: str, shape: tuple[int, ...]) -> Matrix:
    if datatype == "BYTES":
        return object_array([b""] * prod(shape), shape)
    return np.zeros(shape, DATATYPES[datatype].numpy)


def _values(array: Matrix) -> Matrix:
    """Return an array for a library: bytes as text."""
    if array.dtype != object:
        return array
    try:
        return object_array([element.decode() for element in array.ravel()], array.shape)
    except UnicodeDecodeError:
        raise InvalidArgument("the input has an element that is not UTF-8") from None


def _rows(result: Any) -> Matrix:
    """Return predictions in MLServer's shape: single values of samples become a column."""
    array = np.asarray(result)
    return array.reshape(-1, 1) if array.ndim == 1 else array
