"""`pb_utils.InferenceRequest`.

A request is either one that came in, or one that a model made to call another model. The
latter are checked and can be looked at; running one is refused (`pb_call`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

from shmserve.errors import Unimplemented
from shmserve.executor.backend import Request
from shmserve.executor.backends.triton.called_request import CalledRequest
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.inference_response import checked_parameters
from shmserve.executor.backends.triton.response_sender import InferenceResponseSender
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.executor.backends.triton.trace import (
    TRITONSERVER_REQUEST_RELEASE_ALL,
    InferenceTrace,
    PreferredMemory,
)
from shmserve.protocol.control.data_messages import Parameter

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
        self._request = CalledRequest(
            request_id,
            correlation_id,
            inputs,
            requested_output_names,
            model_name,
            model_version,
            flags,
            timeout,
            checked_parameters({} if parameters is None else parameters),
        )
        self._inputs = list(inputs)
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
        self = cls.__new__(cls)
        self._request = request
        self._open_sender = open_sender
        # A stream ends when neither request nor sender is left: so there must be one.
        self._sender = open_sender(request) if request.responses is not None else None
        self._inputs = [
            Tensor.of_input(tensor, writable, on_device) for tensor in request.inputs.values()
        ]
        self._flags = None
        return self

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
        number = self._request.parameters.get("sequence_id", 0)
        return number if isinstance(number, int | str) else 0

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
        request = self._request
        return str(request.model_name) if isinstance(request, CalledRequest) else self.served[0]

    def model_version(self) -> int:
        """The version this request is for; -1: whichever is newest."""
        request = self._request
        return int(request.model_version) if isinstance(request, CalledRequest) else self.served[1]

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
        number = self._request.parameters.get(name, 0)
        return number if isinstance(number, int) else 0
