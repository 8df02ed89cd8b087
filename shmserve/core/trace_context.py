"""W3C Trace Context: the trace of a request, from the header field `traceparent`."""

import re

from msgspec import Struct

_TRACEPARENT = re.compile(  # excludes all-zero ids and version ff, which are invalid
    "(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """Trace, and the span that is the parent of further spans. `trace_id`, `span_id`: 32 and 16
    hexadecimal digits. `sampled`: True if the originator of the trace keeps it."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse(traceparent: str) -> TraceContext | None:
    """Return the trace context from a header field, or None if the field is empty or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    return TraceContext(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))
