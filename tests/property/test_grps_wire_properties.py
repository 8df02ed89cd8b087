"""Messages survive the wire; broken bytes are refused, never misread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import (
    NUMPY,
    GenericMap,
    GenericTensor,
    GrpsMessage,
    GrpsStatus,
)
from shmserve.protocol.protobuf import varints
from shmserve.protocol.protobuf.wire import encode_varint
from tests.fuzz.request_targets import grps_wire

_names = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)  # type: ignore[arg-type]
_int32 = st.integers(-(2**31), 2**31 - 1)
_int64 = st.integers(-(2**63), 2**63 - 1)
_double = st.floats(allow_nan=False)


@st.composite
def _tensors(draw: st.DrawFn) -> GenericTensor:
    name = draw(_names)
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape, dtype=int))
    if draw(st.booleans()):
        texts = draw(st.lists(_names, min_size=count, max_size=count))
        return GenericTensor.of(name, np.array(texts, object).reshape(shape))
    kind = draw(st.sampled_from(sorted(NUMPY)))
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 256, count * NUMPY[kind].itemsize, np.uint8)
    array = raw.view(NUMPY[kind])
    if array.dtype.kind == "f":
        array = np.nan_to_num(array)
    return GenericTensor.of(name, array.reshape(shape))


_maps = st.builds(
    GenericMap,
    s_s=st.dictionaries(_names, _names, max_size=3),
    s_b=st.dictionaries(_names, st.binary(max_size=8), max_size=3),
    s_i32=st.dictionaries(_names, _int32, max_size=3),
    s_i64=st.dictionaries(_names, _int64, max_size=3),
    s_f=st.dictionaries(_names, st.floats(width=32, allow_nan=False), max_size=3),
    s_d=st.dictionaries(_names, _double, max_size=3),
)
_payloads = st.one_of(
    st.builds(dict),
    st.builds(lambda v: {"bin_data": v}, st.binary(max_size=64)),
    st.builds(lambda v: {"str_data": v}, _names),
    st.builds(lambda v: {"gtensors": v}, st.lists(_tensors(), max_size=3)),
    st.just({"ndarray": True}),
    st.builds(lambda v: {"gmap": v}, _maps),
)
_statuses = st.none() | st.builds(GrpsStatus, _int32, _names, st.integers(0, 2))
messages = st.builds(
    lambda status, model, payload: GrpsMessage(status=status, model=model, **payload),
    _statuses,
    _names,
    _payloads,
)


def same(left: GrpsMessage, right: GrpsMessage) -> bool:
    """Return True if two messages are equal, with arrays compared by value."""
    if (left.status, left.model, left.which) != (right.status, right.model, right.which):
        return False
    if left.which != "gtensors":
        kind = left.which
        return not kind or getattr(left, kind) == getattr(right, kind)
    pairs = zip(left.gtensors or (), right.gtensors or (), strict=True)
    return all(
        (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape)
        and a.array.dtype == b.array.dtype
        and np.array_equal(a.array, b.array)
        for a, b in pairs
    )


@given(messages)
def test_a_message_survives_the_wire(message: GrpsMessage) -> None:
    wire = message_wire.encode(message)
    assert same(message_wire.parse(wire), message)
    assert message_wire.size_of(message_wire.parts(message)) == len(wire)


@given(messages, st.data())
def test_a_cut_message_is_refused_or_means_less(message: GrpsMessage, data: st.DataObject) -> None:
    wire = message_wire.encode(message)
    cut = data.draw(st.integers(0, len(wire)))
    try:
        message_wire.parse(wire[:cut])
    except InvalidArgument:
        return


@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    grps_wire(data)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_packed_numbers_are_those_written_one_by_one(numbers: list[int]) -> None:
    one_by_one = b"".join(encode_varint(number) for number in numbers)
    assert varints.pack(np.array(numbers, np.uint64)).tobytes() == one_by_one
    assert varints.unpack(memoryview(one_by_one)).tolist() == numbers


@given(st.lists(_int64, max_size=40))
def test_negative_numbers_are_twos_complement(numbers: list[int]) -> None:
    packed = varints.pack(np.array(numbers, np.int64)).tobytes()
    assert packed == b"".join(encode_varint(number) for number in numbers)


@pytest.mark.parametrize("data", [b"\x80", b"\x01\xff", b"\x80" * 10 + b"\x01"])
def test_numbers_without_end_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="varint"):
        varints.unpack(memoryview(data))
