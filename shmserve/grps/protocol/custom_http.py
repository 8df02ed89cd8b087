"""A custom HTTP request of GRPS and its answer, as they travel between frontend and executor.

The body travels beside them, in a tensor of its own: these hold only the head.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.errors import ProtocolViolation

HEAD = "http"  # the tensor that holds an encoded HttpRequest or HttpAnswer
BODY = "http_body"  # the tensor that holds the raw body


class HttpRequest(Struct, frozen=True, array_like=True):
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
_requests = msgspec.msgpack.Decoder(HttpRequest)
_answers = msgspec.msgpack.Decoder(HttpAnswer)


def encode(head: HttpRequest | HttpAnswer) -> bytes:
    return _encoder.encode(head)


def decode_request(data: bytes | memoryview) -> HttpRequest:
    """The head of a request.

    Raises:
        ProtocolViolation: it is no such thing.
    """
    try:
        return _requests.decode(data)
    except msgspec.DecodeError as ex:
        raise ProtocolViolation(f"unreadable HTTP request: {ex}") from ex


def decode_answer(data: bytes | memoryview) -> HttpAnswer:
    """The head of an answer.

    Raises:
        ProtocolViolation: it is no such thing.
    """
    try:
        return _answers.decode(data)
    except msgspec.DecodeError as ex:
        raise ProtocolViolation(f"unreadable HTTP answer: {ex}") from ex
