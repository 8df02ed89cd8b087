"""GRPS JSON agrees with protobuf's json_format for every message."""

import json
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmserve._generated import grps_pb2 as pb
from shmserve.errors import InvalidArgument
from shmserve.grps.protocol import json_reader, json_writer, message_wire
from shmserve.grps.protocol.grps_message import GrpsMessage
from shmserve.grps.protocol.json_writer import shortest

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5)
floats = st.floats(width=32)
doubles = st.floats()
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
uint32 = st.integers(0, (1 << 32) - 1)


def lists(elements: Any) -> Any:
    return st.lists(elements, max_size=4)


tensors = st.builds(
    pb.GenericTensor,
    name=names,
    dtype=st.integers(0, 9),
    shape=lists(uint32),
    flat_uint8=lists(uint32),
    flat_int8=lists(int32),
    flat_int32=lists(int32),
    flat_int64=lists(int64),
    flat_float16=lists(floats),
    flat_float32=lists(floats),
    flat_float64=lists(doubles),
    flat_string=lists(names),
)
maps = st.builds(
    pb.GenericMapData,
    s_s=st.dictionaries(names, names, max_size=3),
    s_b=st.dictionaries(names, st.binary(max_size=5), max_size=3),
    s_i32=st.dictionaries(names, int32, max_size=3),
    s_i64=st.dictionaries(names, int64, max_size=3),
    s_f=st.dictionaries(names, floats, max_size=3),
    s_d=st.dictionaries(names, doubles, max_size=3),
)
payloads = st.one_of(
    st.fixed_dictionaries({"str_data": names}),
    st.fixed_dictionaries(
        {"gtensors": st.builds(pb.GenericTensorData, tensors=st.lists(tensors, max_size=3))}
    ),
    st.fixed_dictionaries({"gmap": maps}),
)
messages = st.builds(lambda model, fields: pb.GrpsMessage(model=model, **fields), names, payloads)
statuses = st.builds(pb.Status, code=int32, msg=names, status=st.integers(0, 2))


def as_proto(message: GrpsMessage) -> pb.GrpsMessage:
    return pb.GrpsMessage.FromString(message_wire.encode(message))


def same(one: Any, other: Any) -> bool:
    """Return True if values and types are equal; NaN equals NaN, floats compare by value."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(messages, st.booleans(), st.booleans())
def test_what_protobuf_writes_is_read_as_it_was(
    message: pb.GrpsMessage, camel: bool, numbers: bool
) -> None:
    text = json_format.MessageToJson(
        message, preserving_proto_field_name=not camel, use_integers_for_enums=numbers
    )
    read = as_proto(json_reader.parse(text.encode()))
    assert same(json_format.MessageToDict(read), json_format.MessageToDict(message))


@given(messages, st.none() | statuses)
def test_what_is_written_is_what_protobuf_writes(
    message: pb.GrpsMessage, status: pb.Status | None
) -> None:
    if status is not None:
        message.status.CopyFrom(status)
    ours = json.loads(json_writer.encode(message_wire.parse(message.SerializeToString())))
    theirs = json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))
    assert as_numbers(ours) == as_numbers(theirs)


def as_numbers(value: Any) -> Any:
    """FP32 compared as FP32: near the ends of the range protobuf prints more digits than needed."""
    if isinstance(value, dict):
        return {
            k: [float(np.float32(x)) if type(x) is float else x for x in v]
            if k in ("flat_float32", "flat_float16") and isinstance(v, list)
            else {n: float(np.float32(x)) if type(x) is float else x for n, x in v.items()}
            if k == "s_f"
            else as_numbers(v)
            for k, v in value.items()
        }
    return [as_numbers(item) for item in value] if isinstance(value, list) else value


@given(st.lists(floats, max_size=50))
def test_shortest_decimals_are_exact_and_short(values: list[float]) -> None:
    array = np.array(values, np.float32)
    printed = shortest(array)
    assert np.array_equal(printed.astype(np.float32), array, equal_nan=True)
    for double, value in zip(printed.tolist(), array, strict=True):
        if np.isfinite(value):
            assert len(digits(double)) <= len(digits(float(str(value))))


def digits(value: float) -> str:
    return repr(value).partition("e")[0].replace(".", "").strip("-0")


def test_shortest_decimals_of_many_bit_patterns() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    array = np.concatenate([bits.view(np.float32), np.linspace(-1e3, 1e3, 200_000, dtype="f4")])
    assert np.array_equal(shortest(array).astype(np.float32), array, equal_nan=True)


members = [
    *("tensors", "name", "dtype", "shape", "flat_float32", "flatInt64", "flat_string"),
    *("s_s", "s_b", "s_i32", "sF", "x"),
]
json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(members), inner, max_size=4)
    ),
    max_leaves=12,
)
documents = st.dictionaries(
    st.sampled_from(
        ["model", "str_data", "strData", "gtensors", "ndarray", "gmap", "bin_data", "status"]
    ),
    json_values,
    max_size=4,
)


@settings(max_examples=300)
@given(documents.map(lambda d: json.dumps(d).encode()) | st.binary(max_size=30))
def test_no_text_breaks_the_parser(text: bytes) -> None:
    try:
        message = json_reader.parse(text)
    except InvalidArgument:
        return
    json_writer.encode(message)
    as_proto(message)


@given(documents)
@example({"strData": [], "gtensors": {}, "str_data": None})
@example({"strData": "a", "str_data": "b"})
def test_what_is_accepted_is_what_protobuf_accepts(document: dict[str, Any]) -> None:
    """For any request. Protobuf tells payloads from nulls as we do."""
    text = json.dumps(document)
    try:
        message = json_reader.parse(text.encode())
    except InvalidArgument:
        return
    if document.get("ndarray") is not None:
        return
    known = {k: v for k, v in document.items() if k != "status"}
    try:
        theirs = json_format.ParseDict(
            json.loads(json.dumps(known)), pb.GrpsMessage(), ignore_unknown_fields=True
        )
    except json_format.ParseError:
        pytest.fail(f"protobuf refuses {text}")
    assert same(json_format.MessageToDict(as_proto(message)), json_format.MessageToDict(theirs))


@given(
    st.lists(st.integers(1, 3), max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.lists(floats, min_size=math.prod(shape), max_size=math.prod(shape)),
        )
    ),
    st.integers(0, 2),
)
def test_nested_lists(case: tuple[tuple[int, ...], list[float]], indent: int) -> None:
    shape, values = case
    array = np.array(values, np.float32).reshape(shape)
    text = json.dumps({"ndarray": array.tolist()}, indent=indent or None).encode()
    (tensor,) = json_reader.parse(text).gtensors or ()
    assert tensor.shape == shape
    assert np.array_equal(tensor.array, array, equal_nan=True)
    nested = json.loads(json_writer.encode_ndarray(GrpsMessage(gtensors=[tensor])))["ndarray"]
    assert np.array_equal(np.array(nested, np.float32), array, equal_nan=True)


@given(st.recursive(st.floats(-9, 9), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_nests_are_regular_for_us_where_they_are_for_numpy(value: Any) -> None:
    text = json.dumps({"ndarray": value}).encode()
    try:
        wanted = np.array(value, np.float64)
    except ValueError:
        with pytest.raises(InvalidArgument):
            json_reader.parse(text)
        return
    if wanted.ndim < 2 and not wanted.size:
        with pytest.raises(InvalidArgument, match="empty"):
            json_reader.parse(text)
        return
    (tensor,) = json_reader.parse(text).gtensors or ()
    assert tensor.shape == wanted.shape
