"""`pb_utils.InferenceRequest` and `InferenceResponse`.

A request is either one that came in, or one that a model made to call another model. The
latter are checked and can be looked at; running one is refused (`pb_call`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from shmserve.errors import Unimplemented
from shmserve.executor.backend import Request
from shmserve.executor.backends.pb_call import CalledRequest
from shmserve.executor.backends.triton.exceptions import TritonError, TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.executor.backends.triton.trace import (
    TRITONSERVER_REQUEST_RELEASE_ALL,
    InferenceTrace,
    PreferredMemory,
)
from shmserve.protocol.control.data_messages import Parameter

if TYPE_CHECKING:
    from shmserve.executor.backends.triton.response_sender import InferenceResponseSender

# Parameters with methods of their own
_RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"}
FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2


class InferenceRequest:
    """One request."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        made = CalledRequest(
            request_id,
            correlation_id,
            inputs,
            requested_output_names,
            model_name,
            model_version,
            flags,
            timeout,
            _checked({} if parameters is None else parameters),
        )
        self._request = made
        self._inputs = made.tensors
        self._flags = flags

    @classmethod
    def received(
        cls,
        request: Request,
        open_sender: Callable[[Request], InferenceResponseSender],
        writable: bool = False,
        on_device: bool = False,
    ) -> InferenceRequest:
        """What a model gets for a request (for the server, not for models). The flags are those
        of `Tensor.of_input`."""
        made = cls.__new__(cls)
        made._request = request
        made._open_sender = open_sender
        # A stream ends when neither request nor sender is left: so there must be one.
        made._sender = open_sender(request) if request.responses is not None else None
        made._inputs = [
            Tensor.of_input(tensor, writable, on_device) for tensor in request.inputs.values()
        ]
        made._flags = None
        return made

    served = ("", 0)  # name and version of the model that this process runs
    _request: Request | CalledRequest
    _open_sender: Callable[[Request], InferenceResponseSender] | None = None
    _sender: InferenceResponseSender | None = None
    _inputs: list[Tensor]
    _flags: int | None  # None: what the parameters say

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
        if self._flags is not None:
            return self._flags
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

    def model_name(self) -> str:
        """The model this request is for."""
        made = self._request
        return made.model_name if isinstance(made, CalledRequest) else self.served[0]

    def model_version(self) -> int:
        """The version this request is for; -1: whichever is newest."""
        made = self._request
        return made.model_version if isinstance(made, CalledRequest) else self.served[1]

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """Only RELEASE_ALL, which is what happens anyway."""
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException(
                "set_release_flags: rescheduling of requests is not supported by this server"
            )

    def trace(self) -> InferenceTrace:
        return InferenceTrace()

    def exec(self, decoupled: bool = False, **_options: object) -> NoReturn:
        raise Unimplemented("InferenceRequest.exec: calling models from a model is not supported")

    async def async_exec(self, decoupled: bool = False, **_options: object) -> NoReturn:
        self.exec(decoupled)

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """The one sender of this request. Ordinary models that use it return None instead of
        a response."""
        if self._sender is None:
            if self._open_sender is None or isinstance(self._request, CalledRequest):
                raise TritonModelException("get_response_sender: the model has made the request")
            self._sender = self._open_sender(self._request)
        return self._sender

    def _number(self, name: str) -> int:
        found = self._request.parameters.get(name, 0)
        return found if isinstance(found, int) else 0


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

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
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TritonModelException("output_tensors must be a list of Tensor")
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._tensors = tensors
        self._error = error
        self._parameters = _checked({} if parameters is None else parameters)

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
