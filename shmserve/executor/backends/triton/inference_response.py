"""Inference response (`pb_utils.InferenceResponse`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shmserve.executor.backends.triton.exceptions import TritonError, TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor, check_tensors
from shmserve.protocol.control.data_messages import Parameter


class InferenceResponse:
    """Answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        if not isinstance(output_tensors, list | tuple):
            raise TypeError(
                f"output_tensors must be a list of Tensor, got {type(output_tensors).__name__}"
            )
        tensors = list(output_tensors)
        check_tensors("output_tensors", tensors)
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._tensors = tensors
        self._error = error
        self._parameters = checked_parameters({} if parameters is None else parameters)

    @classmethod
    def called(
        cls, tensors: list[Tensor], error: TritonError | None, parameters: dict[str, Parameter]
    ) -> InferenceResponse:
        """Return the response of a called model (for the server, not for models)."""
        self = cls(tensors, error)
        self._parameters = parameters
        return self

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the response's parameters as JSON text."""
        return msgspec.json.encode(self._parameters).decode()

    def set_parameters(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = checked_parameters(parameters)

    @property
    def plain_parameters(self) -> dict[str, Parameter]:
        """Parameters as given (for the server, not for models)."""
        return self._parameters


def checked_parameters(parameters: Any) -> dict[str, Parameter]:
    """Return a copy of a model's parameters for a request or a response.

    Raises:
        TritonModelException: not a dict, or a name or value of a wrong type.
    """
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(name)}"
            )
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return dict(parameters)
