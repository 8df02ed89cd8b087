"""Output check: compares a model's outputs with the configuration before a client sees them.

A wrong type or shape is reported as the model's mistake, because the client's request was right.
Without the check, clients would read bytes of another type as garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shmserve.errors import Internal
from shmserve.executor.backend import Output
from shmserve.executor.backends.dlpack import to_array
from shmserve.tensor.dtypes import DATATYPES, from_numpy
from shmserve.tensor.spec import ModelSpec, TensorSpec, fits


class OutputCheck:
    """Checks a model's outputs, and makes `Output`s of arrays on the host or on a GPU.
    `parameters`: parameters of the model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.parameters = spec.parameters
        self._model = spec.name
        self._specs = {output.name: output for output in spec.outputs}
        self._fitting: dict[str, tuple[int, ...]] = {}  # last shape that fitted, by output
        self._dtypes: dict[str, np.dtype[Any]] = {}  # last dtype that fitted, by output

    def expect(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        """Return the description of an output that is to have a shape. Raise Internal if the model
        has no such output, or the output must have another shape."""
        spec = self._specs.get(name)
        if spec is None:
            raise self._unknown(name)
        if shape != self._fitting.get(name):
            self._check_shape(spec, shape)
        return spec

    def answer(
        self, requested: tuple[str, ...], given: Mapping[str, Any], partial: bool = False
    ) -> tuple[Output, ...]:
        """Return the requested outputs in the request's order. Unrequested outputs are dropped.
        `partial`: True if outputs may be missing, as in the answers of a stream. Raise Internal if
        an output is unknown, missing, or of a wrong type or shape."""
        outputs: dict[str, Output] = {}
        for name, value in given.items():
            spec = self._specs.get(name)
            if spec is None:
                raise self._unknown(name)
            array = value
            if type(value) is not np.ndarray:
                array = to_array(value, f"model '{self._model}': output '{name}'")
            if array.dtype is not self._dtypes.get(name):
                array = self._of_datatype(spec, array)
            if array.shape != self._fitting.get(name):
                self._check_shape(spec, array.shape)
            outputs[name] = Output(name, spec.datatype, array)
        if tuple(outputs) == requested:
            return tuple(outputs.values())
        chosen: list[Output] = []
        for name in requested:
            if name in outputs:
                chosen.append(outputs[name])
            elif not partial:
                raise Internal(f"model '{self._model}' gave no output '{name}'")
        return tuple(chosen)

    def _of_datatype(self, spec: TensorSpec, array: Any) -> Any:
        """Return an array of an output, strings as objects. Raise Internal for a wrong dtype."""
        kind = DATATYPES[spec.datatype]
        if array.dtype != kind.numpy and from_numpy(array.dtype) is not kind:
            raise Internal(
                f"model '{self._model}': output '{spec.name}' must have datatype {kind.name} "
                f"({kind.numpy}), got {array.dtype}"
            )
        if array.dtype.kind in "SU":
            return array.astype(object)
        self._dtypes[spec.name] = array.dtype
        return array

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if not fits(spec.shape, shape):
            raise Internal(
                f"model '{self._model}': output '{spec.name}' must have shape "
                f"{list(spec.shape)}, got {list(shape)}"
            )
        self._fitting[spec.name] = shape

    def _unknown(self, name: str) -> Internal:
        return Internal(f"model '{self._model}' gave an unknown output '{name}'")
