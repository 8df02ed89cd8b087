"""GRPS messages and custom HTTP requests for the native dialect.

In a worker that takes GRPS messages (parameter `grps` of config.pbtxt is "message"),
`request.grps` is the message. For a request to the worker's own HTTP path, `request.http` is the
request. The worker returns, yields or sends a `shmserve.grps.Message`, or any valid answer to a
custom HTTP request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from shmserve.errors import Internal
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.backends.native.dialect import NativeRequest
from shmserve.executor.backends.native.request_forms import RequestForm
from shmserve.executor.backends.native.stream_dialect import StreamRequest
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.grps.executor import message_answers
from shmserve.grps.executor.flask_request import HttpRequest, request_of
from shmserve.grps.executor.flask_response import answer_of, response_of
from shmserve.grps.protocol import custom_http, message_wire, model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.protocol.grps_message import GrpsMessage, success
from shmserve.tensor.spec import ModelSpec


class _WithMessages:
    """Additional attributes of requests to workers that take messages."""

    __slots__ = ()
    _request: Request
    _check: OutputCheck
    _first: bool

    @property
    def grps(self) -> GrpsMessage | None:
        """Return the GRPS message, or None if the request has no message. Tensors and binary data
        of the message are views of shared memory.

        Raises:
            InvalidArgument: the message cannot be read.
        """
        tensor = self._request.inputs.get(model_parameters.MESSAGE)
        # Parse from the array: if the model keeps a part of it, that is noticed, and the input's
        # slot is kept.
        return None if tensor is None else message_wire.parse(tensor.numpy().data)

    @property
    def streaming(self) -> bool:
        """Return True if the client asked for a stream."""
        return bool(self._request.parameters.get(model_parameters.STREAMING))

    @property
    def http(self) -> HttpRequest | None:
        """Return the request to the worker's own HTTP path; None if it came another way."""
        return request_of(self._request.inputs)

    def answer(self, result: Any, partial: bool = False) -> Response:
        """Convert a result to a response, as `NativeRequest.answer`. The result is a message, or
        for HTTP any argument of `response_of`."""
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
    """A request to a worker that takes messages."""

    __slots__ = ()


class MessageStream(_WithMessages, StreamRequest):
    """A request to a decoupled worker that takes and sends messages."""

    __slots__ = ()


_FORM = RequestForm(MessageRequest, MessageStream)


def form_of(spec: ModelSpec) -> RequestForm | None:
    """Return the form for models that take messages or HTTP requests, None for other models."""
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
