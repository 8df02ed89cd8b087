"""Head of a custom HTTP request of GRPS, and of its answer, between frontend and executor.

The body travels in a tensor of its own.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.protocol.decoding import msgpack_decoder

HEAD = "http"  # name of the tensor with an encoded RequestHead or HttpAnswer
BODY = "http_body"  # name of the tensor with the raw body


class RequestHead(Struct, frozen=True, array_like=True):
    """The head of a request. `query` and `headers` keep order and repetitions."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    remote: str = ""


class HttpAnswer(Struct, frozen=True, array_like=True):
    """The head of an answer. In a stream, only the first part has a head."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_requests = msgpack_decoder(RequestHead)
_answers = msgpack_decoder(HttpAnswer)


def encode(head: RequestHead | HttpAnswer) -> bytes:
    return _encoder.encode(head)


def decode_request(data: bytes | memoryview) -> RequestHead:
    """Decode the head of a request. Raises UnreadableMessage."""
    head: RequestHead = _requests(data)
    return head


def decode_answer(data: bytes | memoryview) -> HttpAnswer:
    """Decode the head of an answer; raises as `decode_request`."""
    head: HttpAnswer = _answers(data)
    return head
