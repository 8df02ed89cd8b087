"""Valid `traceparent` fields, and their contents."""

import pytest

from shmserve.core.trace_context import TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_what_a_client_says() -> None:
    assert parse(f"00-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN)
    assert parse(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, sampled=False)
    assert parse(f"01-{TRACE}-{SPAN}-03") == TraceContext(TRACE, SPAN), "other flags are others'"
    assert str(TraceContext(TRACE, SPAN)) == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "text",
    [
        *("", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-x", f"ff-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"),
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_none(text: str) -> None:
    assert parse(text) is None
