"""Messages of a stream that wait for the rpc's thread."""

from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.core.scheduling.admission import CallPlace
from shmserve.frontends.grpc.http2_engine.http2_call import AHEAD, Gone, Http2Call
from shmserve.frontends.http2.grpc_framing import GrpcMessage


@pytest.fixture
def call():
    """A stream with two messages above the limit of waiting messages, whose client has no
    credit."""
    given: list[int] = []
    owner: Any = SimpleNamespace(
        client=SimpleNamespace(number=1), given=given, give_credit=lambda _, count: given.append(1)
    )
    method = SimpleNamespace(streams=True, max_bytes=1 << 20, tensors=None, views=False)
    head: Any = SimpleNamespace(method=method, timeout_s=float("inf"), encoding="identity")
    call = Http2Call(owner, 1, head, CallPlace(1), 0.0, Settings())
    for number in range(AHEAD + 2):
        call.put(GrpcMessage(False, memoryview(bytes([number]))))
    call.withheld = AHEAD + 2
    return call


def test_a_client_may_send_again_once_few_messages_wait(call: Http2Call) -> None:
    owner: Any = call.owner
    messages, seen = call.requests(), []
    for _ in range(4):
        call.withheld = 1
        next(messages)
        seen.append((len(call._messages), len(owner.given)))
    assert seen == [(AHEAD + 1, 0), (AHEAD, 0), (AHEAD - 1, 1), (AHEAD - 2, 2)]


def test_a_call_that_has_ended_keeps_no_messages(call: Http2Call) -> None:
    call.end()
    assert not call._messages
    with pytest.raises(Gone):
        next(call.requests())
