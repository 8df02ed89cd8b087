"""What a model builds to call another model: checked like Triton's, never run."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.protocol.control.data_messages import Parameter

_KINDS = {
    "request_id": str,
    "inputs": list | tuple,
    "requested_output_names": list | tuple,
    "model_name": str,
    "model_version": int,
    "flags": int,
    "correlation_id": int | str,
    "timeout": int,
}


class CalledRequest(Struct, frozen=True):
    """The fields of a request that a model has made; what a received one has, under its names.

    Raises:
        TypeError: a field of a wrong type.
        TritonModelException: an input that is no tensor.
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

    def __post_init__(self) -> None:
        for field, kind in _KINDS.items():
            _check(field, getattr(self, field), kind)
        for name in self.requested_output_names:
            _check("requested_output_names", name, str)
        if not all(isinstance(tensor, Tensor) for tensor in self.inputs):
            raise TritonModelException("inputs must be a list of Tensor")

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


def _check(field: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"InferenceRequest: {field} cannot be {type(value).__name__}")
