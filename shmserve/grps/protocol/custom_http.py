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


encode = msgspec.msgpack.Encoder().encode
decode_request = msgpack_decoder(RequestHead)  # raises UnreadableMessage, as the next
decode_answer = msgpack_decoder(HttpAnswer)
