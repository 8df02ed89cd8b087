"""Inference request (`pb_utils.InferenceRequest`), received by a model or made by a model.

A model makes a request to call another model, by `exec` or `async_exec`. Such a request has the
same accessors as a received request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from shmserve.executor.backend import Request
from shmserve.executor.backends.triton import other_models
from shmserve.executor.backends.triton.called_request import (
    FLAG_SEQUENCE_END,
    FLAG_SEQUENCE_START,
    CalledRequest,
)
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.inference_response import (
    InferenceResponse,
    checked_parameters,
)
from shmserve.executor.backends.triton.other_models import ResponseIterator
from shmserve.executor.backends.triton.response_sender import InferenceResponseSender
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.protocol.control.data_messages import Parameter
from shmserve.tensor.spec import ModelSpec

# Parameters that have their own methods
_RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"}


class MemoryType(IntEnum):
    """Kind of memory in which a tensor lies."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class PreferredMemory:
    """Preferred memory for the answer of a call to another model."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError("preferred_memory_type must be a TRITONSERVER_MEMORY_ constant")
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """Trace of a request, if the request is traced with `trace_mode = opentelemetry`."""

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, an object with `traceparent`; None without a
        trace."""
        return json.dumps({"traceparent": self._traceparent}) if self._traceparent else None


class InferenceRequest:
    """Request that a model has received, or has made to call another model."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,  # required, as are the next two
        requested_output_names: Sequence[str | bytes] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        names = requested_output_names
        self._request = CalledRequest(
            _text(request_id),
            correlation_id,
            inputs,
            [_text(name) for name in names] if isinstance(names, list | tuple) else names,
            _text(model_name),
            model_version,
            flags,
            timeout,
            checked_parameters({} if parameters is None else parameters),
        )
        self._inputs = list(inputs or ())
        self._flags = flags

    @classmethod
    def received(
        cls,
        request: Request,
        open_sender: Callable[[Request], InferenceResponseSender],
        writable: bool = False,
        on_device: bool = False,
    ) -> InferenceRequest:
        """Return the request that a model receives (for the server, not for models). `writable`
        and `on_device`: as in `Tensor.of_input`."""
        self = cls.__new__(cls)
        self._request = request
        self._open_sender = open_sender
        # A stream ends when neither request nor sender is left, so a stream's sender is opened at
        # once.
        self._sender = open_sender(request) if request.responses is not None else None
        self._inputs = [
            Tensor.of_input(tensor, writable, on_device) for tensor in request.inputs.values()
        ]
        self._flags = None
        return self

    @classmethod
    def serve(cls, spec: ModelSpec) -> None:
        """Set the model, once when it is loaded (for the server, not for models)."""
        cls.served = (spec.name, int(spec.version))
        cls.iterative = spec.config.is_iterative

    served = ("", 0)  # name and version of this process's model
    iterative = False  # True if the model may reschedule requests
    _request: Request | CalledRequest
    _open_sender: Callable[[Request], InferenceResponseSender] | None = None
    _sender: InferenceResponseSender | None = None
    _inputs: list[Tensor]
    _flags: int | None  # None: the flags of the parameters

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> set[str]:
        return set(self._request.requested)

    def request_id(self) -> str:
        return self._request.id

    def correlation_id(self) -> int | str:
        """Return the sequence's id; 0 outside of sequences."""
        number = self._request.parameters.get("sequence_id", 0)
        return number if isinstance(number, int | str) else 0

    def flags(self) -> int:
        if self._flags is not None:
            return self._flags
        parameters = self._request.parameters
        start = FLAG_SEQUENCE_START if parameters.get("sequence_start") else 0
        return start | (FLAG_SEQUENCE_END if parameters.get("sequence_end") else 0)

    def timeout(self) -> int:
        """Return the client's timeout in microseconds; 0 if the client gave none."""
        return self._number("timeout")

    def priority(self) -> int:
        return self._number("priority")

    def parameters(self) -> str:
        """Return the request's own parameters as JSON text."""
        own = {k: v for k, v in self._request.parameters.items() if k not in _RESERVED}
        return msgspec.json.encode(own).decode()

    def model_name(self) -> str:
        """Return the name of the model that the request is for."""
        request = self._request
        return str(request.model_name) if isinstance(request, CalledRequest) else self.served[0]

    def model_version(self) -> int:
        """Return the version of the model that the request is for; -1: the newest."""
        request = self._request
        return int(request.model_version) if isinstance(request, CalledRequest) else self.served[1]

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        """Set RELEASE_ALL (the default), or RELEASE_RESCHEDULE to get the request again in a later
        call of `execute`. The last value set before `execute` returns counts.

        Raises:
            TritonModelException: unknown flags, or the request cannot be rescheduled.
        """
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags: there are no flags {flags}")
        again = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if isinstance(self._request, CalledRequest) or not self.iterative:
            if again:
                raise TritonModelException(
                    "set_release_flags: only requests to a model with "
                    "sequence_batching.iterative_sequence can be rescheduled"
                )
        else:
            self._request.reschedule(again)

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._request.traceparent)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call the model that the request names, and wait for its response.

        Args:
            decoupled: True to get an iterator over all responses. Allowed with any model.

        Returns:
            The response, or an iterator. An error of the model, or of the call, is the error of
            the response. Outputs are read-only views of the called executor's memory, which is
            released when the last array on it is collected.

        Raises:
            TritonModelException: the model has not made this request, or a field is invalid.
        """
        return other_models.execute(self._called("exec"), decoupled)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call a model like `exec`, as a coroutine; several calls may run at a time. With
        `decoupled`, the iterator also supports `async for`. Cancelling the coroutine cancels
        the call."""
        return await other_models.execute_async(self._called("async_exec"), decoupled)

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the only sender of this request. A model that is not decoupled returns None from
        `execute` instead of a response if it uses the sender.

        Raises:
            TritonModelException: the model has made the request.
        """
        if self._sender is None:
            if self._open_sender is None or isinstance(self._request, CalledRequest):
                raise TritonModelException("get_response_sender: the model has made the request")
            self._sender = self._open_sender(self._request)
        return self._sender

    def _called(self, what: str) -> CalledRequest:
        if not isinstance(self._request, CalledRequest):
            raise TritonModelException(f"{what}: only requests that the model has made can be run")
        return msgspec.structs.replace(self._request, flags=self._flags)

    def _number(self, name: str) -> int:
        number = self._request.parameters.get(name, 0)
        return number if isinstance(number, int) else 0


def _text(given: Any) -> Any:
    """Return names given as `bytes`, such as elements of BYTES tensors, as text."""
    if not isinstance(given, bytes):
        return given
    try:
        return given.decode()
    except UnicodeDecodeError:
        raise TypeError(f"InferenceRequest: {given!r} is no UTF-8") from None
