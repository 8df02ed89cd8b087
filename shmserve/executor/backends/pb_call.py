"""What a model builds to call another model: checked like Triton's, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.protocol.control.data_messages import Parameter


class CalledRequest:
    """The fields of a made request, under the names of a received one."""

    cancelled = False

    def __init__(
        self,
        request_id: str,
        correlation_id: int | str,
        inputs: Sequence[Tensor],
        requested: Sequence[str],
        model_name: str,
        model_version: int,
        flags: int,
        timeout: int,
        parameters: Mapping[str, Parameter],
    ) -> None:
        self.id = _typed("request_id", request_id, str)
        self.tensors: list[Tensor] = list(_typed("inputs", inputs, list | tuple))
        names = _typed("requested_output_names", requested, list | tuple)
        self.requested = tuple(_typed("requested_output_names", name, str) for name in names)
        self.model_name = _typed("model_name", model_name, str)
        self.model_version = _typed("model_version", model_version, int)
        _typed("flags", flags, int)
        own = {
            "sequence_id": _typed("correlation_id", correlation_id, int | str),
            "timeout": _typed("timeout", timeout, int),
        }
        self.parameters: dict[str, Parameter] = {**parameters, **own}
        if not all(isinstance(tensor, Tensor) for tensor in self.tensors):
            raise TritonModelException("inputs must be a list of Tensor")


def _typed(field: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"InferenceRequest: {field} cannot be {type(value).__name__}")
    return value
