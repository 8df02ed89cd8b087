"""GRPS messages and custom HTTP requests for the native dialect.

A worker that takes GRPS messages (parameter `grps` of config.pbtxt is "message") looks at
`request.grps`, or at `request.http` of a request to its own HTTP path, and returns, yields or sends
a `shmserve.grps.Message`, or what a custom HTTP request may be answered with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from shmserve.errors import Internal
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.backends.native.dialect import NativeRequest
from shmserve.executor.backends.native.request_forms import RequestForm
from shmserve.executor.backends.native.stream_request import StreamRequest
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.grps.executor import message_answers
from shmserve.grps.executor.flask_request import HttpRequest, request_of
from shmserve.grps.executor.flask_response import answer_of, response_of
from shmserve.grps.protocol import custom_http, message_wire, model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.protocol.grps_message import GrpsMessage, success
from shmserve.tensor.spec import ModelSpec


class _WithMessages:
    """What requests of workers that take messages have beside those with tensors."""

    __slots__ = ()
    _request: Request
    _check: OutputCheck
    _first: bool

    @property
    def grps(self) -> GrpsMessage | None:
        """The GRPS message; None: the request has none.

        Its tensors and binary data are views of shared memory.

        Raises:
            InvalidArgument: it cannot be read.
        """
        tensor = self._request.inputs.get(model_parameters.MESSAGE)
        # From the array: what the model keeps of it is then known, and keeps the input's slot.
        return None if tensor is None else message_wire.parse(tensor.numpy().data)

    @property
    def streaming(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self._request.parameters.get(model_parameters.STREAMING))

    @property
    def http(self) -> HttpRequest | None:
        """A request to the worker's own HTTP path; None: it came another way."""
        return request_of(self._request.inputs)

    def answer(self, result: Any, partial: bool = False) -> Response:
        """As `NativeRequest.answer`, of a message, or for HTTP of what `answer_of` takes."""
        if custom_http.HEAD in self._request.inputs:
            return self._http_response(result)
        return _message_response(self._request, result)

    def _http_response(self, result: Any) -> Response:
        first, self._first = self._first, False  # type: ignore[misc]  # a slot of NativeRequest
        if isinstance(result, GrpsMessage):
            result = result.str_data if result.str_data is not None else result.bin_data or b""
        try:
            head, body = answer_of(response_of(result))
        except ValueError as ex:
            raise Internal(str(ex)) from None
        if self.streaming and not isinstance(result, tuple):
            kind = model_parameters.stream_type(self._check.parameters)
            head = HttpAnswer(head.status, (("Content-Type", kind),))
        return message_answers.http(head if first else None, body)


class MessageRequest(_WithMessages, NativeRequest):
    """A request of a worker that takes messages."""

    __slots__ = ()


class MessageStream(_WithMessages, StreamRequest):
    """A request of a decoupled worker that takes messages; it sends them, too."""

    __slots__ = ()


_FORM = RequestForm(MessageRequest, MessageStream)


def form_of(spec: ModelSpec) -> RequestForm | None:
    """Messages, for models that take them or HTTP requests."""
    takes = model_parameters.takes_message(spec) or model_parameters.takes_http(spec)
    return _FORM if takes else None


def _message_response(request: Request, result: Any) -> Response:
    if not isinstance(result, GrpsMessage):
        raise Internal(f"infer must give a grps.Message, got {type(result).__name__}")
    message = result if result.status else structs.replace(result, status=success())
    pieces = message_wire.parts(message)
    size = message_wire.size_of(pieces)
    slot = request.offer(model_parameters.MESSAGE, "UINT8", (size,))
    at = 0
    for piece in pieces:
        slot[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return Response(outputs=(Output(model_parameters.MESSAGE, "UINT8", slot),), copied=size)
