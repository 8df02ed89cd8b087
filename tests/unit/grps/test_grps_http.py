"""The heads of custom HTTP requests and answers."""

import pytest

from shmserve.errors import ProtocolViolation
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import HttpAnswer, RequestHead


def test_heads_travel_both_ways() -> None:
    request = RequestHead(
        "POST", "/v1/chat", (("a", "1"), ("a", "2")), (("Content-Type", "text/plain"),), "10.0.0.1"
    )
    assert custom_http.decode_request(custom_http.encode(request)) == request
    answer = HttpAnswer(418, (("X-Tea", "pot"),))
    assert custom_http.decode_answer(memoryview(custom_http.encode(answer))) == answer


def test_a_head_of_another_shape_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        custom_http.decode_request(b"\xc1")
    with pytest.raises(ProtocolViolation):
        custom_http.decode_answer(custom_http.encode(RequestHead("GET", "/")))
