"""The wire parser agrees with protobuf on reading and writing, for any bytes."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.errors import InvalidArgument
from shmserve.protocol.protobuf.infer_parameters import Uint64
from shmserve.protocol.protobuf.infer_wire import (
    encode_response,
    encode_stream_response,
    parse_request,
    response_parts,
)
from shmserve.tensor.dtypes import DATATYPES
from tests.fuzz.request_targets import model_infer_seeds
from tests.property import wild_wire

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
_PARAMETERS = st.dictionaries(
    _TEXT,
    st.one_of(st.booleans(), _INT64, st.floats(), _TEXT, st.integers(0, (1 << 64) - 1).map(Uint64)),
    max_size=4,
)
_OUTPUTS = st.lists(
    st.tuples(
        _TEXT,
        st.sampled_from(sorted(DATATYPES)),
        st.lists(st.integers(0, (1 << 63) - 1) | st.integers(0, 3), max_size=4).map(tuple),
        st.binary(max_size=300),
    ),
    max_size=4,
)


@given(wild_wire.REQUESTS)
@settings(max_examples=600)
def test_a_request_is_read_as_protobuf_reads_it(data: bytes) -> None:
    wild_wire.assert_same(parse_request(data), data)
    canonical = pb.ModelInferRequest.FromString(data).SerializeToString()
    wild_wire.assert_same(parse_request(canonical), canonical)


@given(_TEXT, _TEXT, _TEXT, _PARAMETERS, _OUTPUTS)
@settings(max_examples=300)
def test_a_response_is_what_protobuf_reads(
    model: str, version: str, request_id: str, parameters: dict[str, Any], rows: list[Any]
) -> None:
    outputs, raw = [row[:3] for row in rows], [memoryview(row[3]) for row in rows]
    answer = (model, version, request_id, parameters, outputs, raw)
    data = encode_response(*answer)
    message = pb.ModelInferResponse.FromString(data)
    assert (message.model_name, message.model_version, message.id) == (model, version, request_id)
    assert wild_wire.told(message.parameters) == wild_wire.seen(parameters)
    got = [(o.name, o.datatype, tuple(o.shape)) for o in message.outputs]
    assert got == [row[:3] for row in rows]
    assert not any(o.parameters or o.HasField("contents") for o in message.outputs)
    assert list(message.raw_output_contents) == [row[3] for row in rows]

    parts = encode_stream_response(model, response_parts(*answer))
    assert parts == encode_stream_response(model, data)
    streamed = pb.ModelStreamInferResponse.FromString(parts)
    assert streamed.error_message == model
    assert streamed.HasField("infer_response")
    assert streamed.infer_response.SerializeToString(deterministic=True) == (
        message.SerializeToString(deterministic=True)
    )


def _samples() -> list[bytes]:
    """Return requests that use every field."""
    messages = model_infer_seeds()
    group = b"\x5b\x08\x01\x12\x03abc\x5c"
    return [*messages, messages[0] + messages[1], group + messages[1] + group]


_BYTES = [0, 1, 2, 7, 8, 0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A, 0x7F, 0x80, 0xFF]
_PIECES = [
    b"\x80" * 11 + b"\x01",  # an overlong varint
    b"\x0a\xff\xff\xff\xff\x0f",  # a length of 32 bits
    b"\x0a\x81\x80\x80\x80\x80\x00a",  # a length with too many bytes
    b"\x0a\x01\xff",  # no UTF-8
    b"\x0d\x01\x02\x03\x04",  # a known number of another type
    b"\x13" * 70 + b"\x14" * 70,  # deep groups
    b"\x13\x1c",  # groups that do not match
    b"\x22\x00",  # a parameter without anything
    b"\x22\x09\x0a\x01k\x12\x02\x08\x01\x18\x05",  # an entry with more than key and value
    b"\x1a\x03\x80\x80\x80",  # a packed array cut within an element
    b"\x03\x04",  # field 0
]


def _mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(8)
        if kind == 0 and at < len(out):
            out[at] = rng.choice(_BYTES) if rng.random() < 0.5 else rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randint(1, 5)]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        elif kind == 3:
            out[at:at] = rng.choice(_PIECES)
        elif kind == 4:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + rng.randint(1, 40)]
        elif at < len(out):
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def _refused_or_agreed(data: bytes) -> bool:
    """Return False if the request was refused with InvalidArgument, True if it was read like
    protobuf."""
    try:
        parsed = parse_request(data)
        for source in parsed.inputs:
            wild_wire.elements(source.contents)
    except InvalidArgument:
        return False
    wild_wire.assert_same(parsed, data)
    return True


def test_ten_thousand_mutations_are_refused_or_read_as_protobuf_does() -> None:
    rng = random.Random(20_240_601)
    samples = _samples()
    assert all(_refused_or_agreed(sample) for sample in samples)
    read = sum(_refused_or_agreed(_mutated(rng.choice(samples), rng)) for _ in range(10_000))
    assert 1000 < read < 9000  # both happened often enough to mean something


def test_a_request_cut_anywhere_is_refused_or_read_as_protobuf_does() -> None:
    for sample in _samples():
        for stop in range(len(sample)):
            _refused_or_agreed(sample[:stop])


def test_every_refusal_of_protobuf_is_one_of_ours() -> None:
    """Messages that protobuf accepts and we refuse are few kinds, listed in the modules.

    Only protobuf 6 accepts long lengths.
    """
    rng = random.Random(7)
    samples = _samples()
    stricter = set()
    for _ in range(3000):
        data = _mutated(rng.choice(samples), rng)
        try:
            pb.ModelInferRequest.FromString(data)
        except Exception:
            continue
        try:
            parse_request(data)
        except InvalidArgument as ex:
            stricter.add(ex.message.removeprefix("the request is not a valid protobuf message: "))
    allowed = (
        "a parameter's entry has the unknown field",
        "parameter '",
        "more than 64 groups",
        "a length of more",
    )
    assert [message for message in stricter if not message.startswith(allowed)] == []
