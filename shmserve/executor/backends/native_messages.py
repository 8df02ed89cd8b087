"""GRPS messages and custom HTTP requests for the native dialect."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from shmserve.errors import Internal
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.grps.executor import answers
from shmserve.grps.executor.flask_request import HttpRequest, answer_of
from shmserve.grps.protocol import custom_http as grps_http
from shmserve.grps.protocol import message_wire as grps_wire
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.protocol.message import GrpsMessage, success


def message_of(request: Request) -> GrpsMessage | None:
    """The request's message, on views of its input; None: it has none.

    Raises:
        InvalidArgument: it cannot be read.
    """
    given = request.inputs.get(grps_spec.MESSAGE)
    # From the array: what the model keeps of it is then known, and keeps the input's slot.
    return None if given is None else grps_wire.parse(given.numpy().data)


def http_of(request: Request) -> HttpRequest | None:
    """The request as it came to the model's own path; None: it came another way."""
    head, body = request.inputs.get(grps_http.HEAD), request.inputs.get(grps_http.BODY)
    if head is None:
        return None
    return HttpRequest(
        grps_http.decode_request(head.buffer), bytes(body.buffer) if body is not None else b""
    )


def response_of(request: Request, result: Any, check: OutputCheck, first: bool = True) -> Response:
    """What a model gave for a request with a message or of custom HTTP.

    Args:
        request: the request.
        result: a message, or for HTTP what `answer_of` takes.
        check: of the model's outputs.
        first: it is the first part of the answer.

    Raises:
        InvalidArgument: it cannot be sent.
        Internal: it is nothing of the kind.
    """
    if grps_http.HEAD in request.inputs:
        return _http_response(request, result, check, first)
    if not isinstance(result, GrpsMessage):
        raise Internal(f"infer must give a grps.Message, got {type(result).__name__}")
    message = result if result.status else structs.replace(result, status=success())
    pieces = grps_wire.parts(message)
    size = grps_wire.size_of(pieces)
    slot = request.offer(grps_spec.MESSAGE, "UINT8", (size,))
    at = 0
    for piece in pieces:
        slot[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return Response(outputs=(Output(grps_spec.MESSAGE, "UINT8", slot),), copied=size)


def _http_response(request: Request, result: Any, check: OutputCheck, first: bool) -> Response:
    if isinstance(result, GrpsMessage):
        result = result.str_data if result.str_data is not None else result.bin_data or b""
    try:
        head, body = answer_of(result)
    except ValueError as ex:
        raise Internal(str(ex)) from None
    if request.parameters.get(grps_spec.STREAMING) and not isinstance(result, tuple):
        head = HttpAnswer(head.status, (("Content-Type", check.stream_type),))
    return answers.http(head if first else None, body)
