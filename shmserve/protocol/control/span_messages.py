"""Messages from frontends to the exporter: spans of finished requests, as in OpenTelemetry.

The channel goes one way, is used for nothing else, and never blocks a frontend. Spans that find no
room are dropped.
"""

import msgspec
from msgspec import Struct

from shmserve.protocol.decoding import msgpack_decoder

Attribute = str | int


class Span(Struct, frozen=True, array_like=True):
    """A part of a request.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: 16 hexadecimal digits; empty without a parent.
        start_ns: wall clock, nanoseconds since 1970.
        end_ns: wall clock, nanoseconds since 1970.
        server: the span is a whole request of a client.
        error: error message for people.
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
    """A batch of spans. `dropped`: number of spans that the process lost since its last batch."""

    spans: tuple[Span, ...]
    dropped: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgpack_decoder(Spans)
