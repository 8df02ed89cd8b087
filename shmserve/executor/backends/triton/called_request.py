"""Called request: a model's request to another model, checked as in Triton."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.executor.backends.triton.data_types import as_strings
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor, check_tensors
from shmserve.executor.calling import CalledTensor, ModelCall
from shmserve.protocol.control.data_messages import Parameter
from shmserve.tensor.dtypes import from_numpy

FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2

_KINDS = {
    "request_id": str,
    "inputs": list | tuple,
    "requested_output_names": list | tuple,
    "model_name": str,
    "model_version": int,
    "flags": int,
    "timeout": int,
}


class CalledRequest(Struct, frozen=True):
    """Fields of a request that a model has made, with the attributes of a received request.

    Raises:
        TypeError: a field has a wrong type or is None, or an input is no tensor.
        TritonModelException: an input is None, or the correlation id is neither a number nor text.
    """

    request_id: Any
    correlation_id: Any
    inputs: Any
    requested_output_names: Any
    model_name: Any
    model_version: Any
    flags: Any
    timeout: Any
    own_parameters: dict[str, Parameter]

    cancelled = False
    traceparent = ""

    def __post_init__(self) -> None:
        for field, kind in _KINDS.items():
            _check(field, getattr(self, field), kind)
        for name in self.requested_output_names:
            _check("requested_output_names", name, str)
        check_tensors("inputs", self.inputs)
        _check("correlation_id", self.correlation_id, object)
        if not isinstance(self.correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")

    @property
    def id(self) -> str:
        return str(self.request_id)

    @property
    def requested(self) -> tuple[str, ...]:
        return tuple(self.requested_output_names)

    @property
    def parameters(self) -> dict[str, Parameter]:
        own = self.own_parameters
        return {**own, "sequence_id": self.correlation_id, "timeout": self.timeout}

    def call(self, decoupled: bool) -> ModelCall:
        """Return the call to the other model. `decoupled`: True for a stream of answers."""
        parameters = dict(self.own_parameters)
        if self.correlation_id:
            parameters["sequence_id"] = self.correlation_id
        if self.flags & FLAG_SEQUENCE_START:
            parameters["sequence_start"] = True
        if self.flags & FLAG_SEQUENCE_END:
            parameters["sequence_end"] = True
        if self.timeout:
            parameters["timeout"] = self.timeout
        return ModelCall(
            self.model_name,
            [_input(tensor) for tensor in self.inputs],
            "" if self.model_version < 0 else str(self.model_version),
            self.requested,
            self.request_id,
            parameters,
            stream=decoupled,
        )


def _input(tensor: Tensor) -> CalledTensor:
    array = tensor.array()
    kind = from_numpy(array.dtype)
    assert kind is not None  # checked by Tensor
    if kind.name == "BYTES":
        array = as_strings(array)
    return CalledTensor(tensor.name(), kind.name, array)


def _check(field: str, value: Any, kind: Any) -> None:
    if value is None:
        raise TypeError(f"InferenceRequest: argument '{field}' is missing, or None")
    if not isinstance(value, kind):
        raise TypeError(f"InferenceRequest: {field} cannot be {type(value).__name__}")
