"""W3C Trace Context: which trace a request is part of, as the header field `traceparent` says."""

from __future__ import annotations

import re

from msgspec import Struct

_TRACEPARENT = re.compile(  # ids of zeros only are none, and there is no version ff
    "(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """A trace, and the span of it that others are children of.

    Attributes:
        trace_id, span_id: 32 and 16 hexadecimal digits.
        sampled: whoever has begun the trace keeps it.
    """

    trace_id: str
    span_id: str
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse(traceparent: str) -> TraceContext | None:
    """What a client has sent; None: nothing, or what cannot be understood."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))
