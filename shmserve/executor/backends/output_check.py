"""Checks what a model answers against its configuration before a client sees it.

A wrong type or shape is the model's mistake, told as one: the client's request was
right, and bytes of another type would be read as garbage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmserve.errors import Internal
from shmserve.executor.backend import Output
from shmserve.executor.backends.array_import import as_array
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.tensor.dtypes import DATATYPES, from_numpy
from shmserve.tensor.spec import ModelSpec, TensorSpec, fits


class OutputCheck:
    """Knows a model's outputs; makes `Output`s of a model's arrays, on the host or on a GPU.

    `messages`: the model answers with GRPS messages, or over HTTP by itself; `stream_type`
    is the content type of the latter's streams.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.messages = grps_spec.takes_message(spec) or grps_spec.takes_http(spec)
        self.stream_type = spec.parameters.get(
            "grps_streaming_ctrl_content_type", grps_spec.STREAM_TYPE
        )
        self._model = spec.name
        self._specs = {output.name: output for output in spec.outputs}

    def spec(self, name: str) -> TensorSpec:
        """The description of an output.

        Raises:
            Internal: the model has no such output.
        """
        found = self._specs.get(name)
        if found is None:
            raise Internal(f"model '{self._model}' gave an unknown output '{name}'")
        return found

    def check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        """Check a shape against the configured dimensions.

        Raises:
            Internal: it names the output, what was wanted and what was given.
        """
        if spec.shape != shape and not fits(spec.shape, shape):
            raise Internal(
                f"model '{self._model}': output '{spec.name}' must have shape "
                f"{list(spec.shape)}, got {list(shape)}"
            )

    def answer(
        self, requested: tuple[str, ...], pairs: Iterable[tuple[str, Any]], partial: bool = False
    ) -> tuple[Output, ...]:
        """The requested outputs, in the request's order; others the model gave are dropped.
        `partial`: some may be missing, as in the answers of a stream.

        Raises:
            Internal: an output is unknown, given twice, missing, or of a wrong type or shape.
        """
        given: dict[str, Output] = {}
        for name, array in pairs:
            if name in given:
                raise Internal(f"model '{self._model}' gave output '{name}' twice")
            given[name] = self._output(self.spec(name), array)
        missing = [name for name in requested if name not in given]
        if missing and not partial:
            raise Internal(f"model '{self._model}' gave no output '{missing[0]}'")
        return tuple(given[name] for name in requested if name in given)

    def _output(self, spec: TensorSpec, value: Any) -> Output:
        where = f"model '{self._model}': output '{spec.name}'"
        try:
            array = as_array(value)
        except (TypeError, ValueError, BufferError) as ex:
            raise Internal(f"{where}: {ex}") from None
        if array is None:
            raise Internal(f"{where} must be an array, got {type(value).__name__}")
        if from_numpy(array.dtype) is not DATATYPES[spec.datatype]:
            raise Internal(
                f"{where} must have datatype {spec.datatype} ({DATATYPES[spec.datatype].numpy}), "
                f"got {array.dtype}"
            )
        self.check_shape(spec, array.shape)
        if array.dtype.kind in "SU":
            array = array.astype(object)
        return Output(spec.name, spec.datatype, array)
