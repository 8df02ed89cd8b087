"""`pb_utils.InferenceRequest` and `InferenceResponse`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shmserve.errors import Unimplemented
from shmserve.executor.backend import Request
from shmserve.executor.backends.pb_errors import TritonError, TritonModelException
from shmserve.executor.backends.pb_tensor import Tensor
from shmserve.protocol.data_messages import Parameter

if TYPE_CHECKING:
    from shmserve.executor.backends.pb_sender import InferenceResponseSender

# Parameters with methods of their own
_RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"}
FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceRequest:
    """One request. Models get these; making one (to call another model) is not supported."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise Unimplemented("calling other models from a model is not supported")

    @classmethod
    def received(
        cls, request: Request, open_sender: Callable[[Request], InferenceResponseSender]
    ) -> InferenceRequest:
        """What a model gets for a request (for the server, not for models)."""
        made = cls.__new__(cls)
        made._request = request
        made._open_sender = open_sender
        # A stream ends when neither request nor sender is left: so there must be one.
        made._sender = open_sender(request) if request.responses is not None else None
        made._inputs = [Tensor.of_input(tensor) for tensor in request.inputs.values()]
        return made

    _request: Request
    _open_sender: Callable[[Request], InferenceResponseSender]
    _sender: InferenceResponseSender | None
    _inputs: list[Tensor]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return list(self._request.requested)

    def request_id(self) -> str:
        return self._request.id

    def correlation_id(self) -> int | str:
        """The sequence's id; 0 outside of sequences."""
        found = self._request.parameters.get("sequence_id", 0)
        return found if isinstance(found, int | str) else 0

    def flags(self) -> int:
        parameters = self._request.parameters
        start = FLAG_SEQUENCE_START if parameters.get("sequence_start") else 0
        return start | (FLAG_SEQUENCE_END if parameters.get("sequence_end") else 0)

    def timeout(self) -> int:
        """Microseconds the client allows; 0: it did not say."""
        return self._number("timeout")

    def priority(self) -> int:
        return self._number("priority")

    def parameters(self) -> str:
        """The request's own parameters as JSON text."""
        own = {k: v for k, v in self._request.parameters.items() if k not in _RESERVED}
        return msgspec.json.encode(own).decode()

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """The one sender of this request. Ordinary models that use it return None instead of
        a response."""
        if self._sender is None:
            self._sender = self._open_sender(self._request)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        if flags != RELEASE_ALL:
            raise TritonModelException(
                "requests cannot be rescheduled: iterative sequences are not supported"
            )

    def _number(self, name: str) -> int:
        found = self._request.parameters.get(name, 0)
        return found if isinstance(found, int) else 0


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        tensors = list(output_tensors or ())
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TritonModelException("output_tensors must be a list of Tensor")
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._tensors = tensors
        self._error = error
        self._parameters = _checked(parameters or {})

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The response's parameters as JSON text."""
        return msgspec.json.encode(self._parameters).decode()

    def set_parameters(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = _checked(parameters)

    @property
    def plain_parameters(self) -> dict[str, Parameter]:
        """As given (for the server, not for models)."""
        return self._parameters


def _checked(parameters: Any) -> dict[str, Parameter]:
    if not isinstance(parameters, Mapping):
        raise TritonModelException("response parameters must be a dict")
    for name, value in parameters.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"response parameter '{name}' must be a bool, int, float or str"
            )
    return dict(parameters)
