"""A custom HTTP request of GRPS and its answer, as they travel between frontend and executor.

The body travels beside them, in a tensor of its own: these hold only the head.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.protocol.decoding import msgpack_decoder

HEAD = "http"  # the tensor that holds an encoded RequestHead or HttpAnswer
BODY = "http_body"  # the tensor that holds the raw body


class RequestHead(Struct, frozen=True, array_like=True):
    """The head of a request. `query` and `headers` keep their order and repetitions."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    remote: str = ""


class HttpAnswer(Struct, frozen=True, array_like=True):
    """The head of an answer; of a stream only its first part has one."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_requests = msgpack_decoder(RequestHead)
_answers = msgpack_decoder(HttpAnswer)


def encode(head: RequestHead | HttpAnswer) -> bytes:
    return _encoder.encode(head)


def decode_request(data: bytes | memoryview) -> RequestHead:
    """The head of a request; raises UnreadableMessage: it is no such thing."""
    head: RequestHead = _requests(data)
    return head


def decode_answer(data: bytes | memoryview) -> HttpAnswer:
    """The head of an answer; raises as `decode_request`."""
    head: HttpAnswer = _answers(data)
    return head
