"""Decoders of foreign bytes: any invalid input raises the decoder's one error."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmserve.errors import UnreadableMessage
from shmserve.grps.protocol import custom_http
from shmserve.protocol.control import client_messages, lane_messages, messages
from shmserve.protocol.control.data_messages import Answer, Cancel, Descriptor, Release
from shmserve.protocol.control.link_messages import Hello, Stats
from shmserve.protocol.decoding import Decode, json_decoder, msgpack_decoder

# Samples are mutated, because decoders refuse most random bytes at the first byte.
TENSOR = client_messages.DescribedTensor("IN", "FP32", (-1, 3))
SAMPLES: list[Any] = [
    client_messages.ClientHello(1),
    client_messages.RegisterMemfd("name", 1 << 40, 3),
    client_messages.Unregister(("a", "b")),
    client_messages.OpenLane("model", "1"),
    client_messages.DescribeModel("model"),
    client_messages.ModelDescribed("1", (TENSOR,), (TENSOR,), decoupled=True),
    lane_messages.LaneRequest(1, (lane_messages.LaneTensor("IN", "FP32", (1,), b"abcd"),)),
    lane_messages.LaneAnswer(1),
    client_messages.Failed("INTERNAL", "text"),
    Answer(7),
    Cancel(7),
    Release(((1, 2), (3, 4))),
    Hello(1, "http", "http-1-aaaa", 1),
    Stats(3, {"rows": [{"a": 1.5, "b": None, "c": b"x"}]}),
    Descriptor(1, 2, 3, 4, 5),
    custom_http.RequestHead("GET", "/", (("a", "b"),), (("c", "d"),), "::1"),
    ["Execute", 1, "model"],
]
DECODERS: dict[str, Decode] = {
    "executor": messages.decode_to_executor,
    "frontend": messages.decode_to_frontend,
    "coordinator": messages.decode_to_coordinator,
    "process": messages.decode_from_coordinator,
    "lane": lane_messages.decode_to_lane,
    "program": lane_messages.decode_from_lane,
    "client socket": client_messages.decode_to_server,
    "client": client_messages.decode_from_server,
    "custom request": custom_http.decode_request,
    "custom answer": custom_http.decode_answer,
    "anything": msgpack_decoder(Any),
    "json": json_decoder(),
    "typed json": json_decoder(dict[str, list[str]]),
}
HOSTILE = (
    b"\x91\xa1\xa9",  # a string that is not UTF-8
    b"\x91" * 5000,  # nested too deep
    b"[" * 100_000,
    b'{"a":' * 3000,
    b'"\xff"',
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million elements, all missing
    b"\xd7\xff" + b"\xff" * 8,  # a time that no clock shows
    b"",
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(msgspec.msgpack.encode(draw(st.sampled_from(SAMPLES))))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=500)
@given(data=st.binary(max_size=64) | mutated())
def test_one_error(name: str, data: bytes) -> None:
    with contextlib.suppress(UnreadableMessage):
        DECODERS[name](memoryview(data))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_one_error_for_what_is_meant_ill(name: str, data: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        DECODERS[name](data)


@given(st.sampled_from(SAMPLES[:6]))
@example(client_messages.ListRegions())
def test_what_is_well_formed_is_read(message: Any) -> None:
    union = client_messages.ToServer | client_messages.FromServer
    assert msgpack_decoder(union)(memoryview(client_messages.encode(message))) == message
