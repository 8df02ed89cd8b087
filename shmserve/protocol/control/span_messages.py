"""What frontends send the exporter: spans of requests that are over, as OpenTelemetry has them.

It goes one way, on a channel of its own that nobody waits for: what finds no room is dropped.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shmserve.protocol.decoding import msgpack_decoder

Attribute = str | int


class Span(Struct, frozen=True, array_like=True):
    """A part of a request.

    Attributes:
        trace_id, span_id, parent_id: 32, 16 and 16 hexadecimal digits; no parent: empty.
        start_ns, end_ns: of the wall clock, since 1970.
        server: it is a whole request of a client.
        error: what it failed with, for people.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    server: bool = False
    attributes: dict[str, Attribute] = {}
    failed: bool = False
    error: str = ""


class Spans(Struct, frozen=True, array_like=True):
    """`dropped`: how many spans the process has not sent since it sent some."""

    spans: tuple[Span, ...]
    dropped: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgpack_decoder(Spans)
