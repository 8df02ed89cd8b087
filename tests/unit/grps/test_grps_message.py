"""The GRPS message and its wire form, case by case."""

import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import (
    GenericMap,
    GenericTensor,
    GrpsDataType,
    GrpsMessage,
    GrpsStatus,
    StatusFlag,
)


def test_large_parts_are_not_copied() -> None:
    floats = np.arange(1000, dtype=np.float32)
    wire = message_wire.encode(GrpsMessage(gtensors=[GenericTensor.of("x", floats)]))
    array = message_wire.parse(wire).tensor("x").array
    assert np.shares_memory(array, np.frombuffer(wire, np.uint8))
    assert not array.flags.writeable
    binary = message_wire.parse(message_wire.encode(GrpsMessage(bin_data=b"abc"))).bin_data
    assert isinstance(binary, memoryview)
    assert binary == b"abc"
    sent = np.arange(1000, dtype=np.float64)
    pieces = message_wire.parts(GrpsMessage(gtensors=[GenericTensor.of("x", sent)]))
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), sent) for piece in pieces if piece)


def test_the_wire_form_is_the_documented_one() -> None:
    message = GrpsMessage(GrpsStatus(200, "OK", StatusFlag.SUCCESS), model="m-1", str_data="hi")
    assert message_wire.encode(message) == (
        b"\x0a\x09\x08\xc8\x01\x12\x02OK\x18\x01" + b"\x12\x03m-1" + b"\x22\x02hi"
    )
    assert message_wire.encode(GrpsMessage(bin_data=b"")) == b"\x1a\x00"
    assert message_wire.parse(b"\x1a\x00").which == "bin_data"


def test_numbers_may_come_unpacked_and_in_pieces() -> None:
    #       dtype INT32      shape [3] unpacked  -1 unpacked                       packed 1, 300
    body = b"\x10\x04" + b"\x18\x03" + b"\x38" + b"\xff" * 9 + b"\x01" + b"\x3a\x03\x01\xac\x02"
    tensors = b"\x0a" + bytes([len(body)]) + body
    message = message_wire.parse(b"\x2a" + bytes([len(tensors)]) + tensors)
    assert message.tensor().array.tolist() == [-1, 1, 300]


def test_the_last_of_the_oneof_counts_and_unknown_fields_do_not() -> None:
    messages = GrpsMessage(str_data="a"), GrpsMessage(bin_data=b"b")
    wire = b"".join(map(message_wire.encode, messages))
    message = message_wire.parse(wire + b"\xa0\x06\x01" + b"\xaa\x06\x02xx")
    assert message.which == "bin_data"
    assert message.str_data is None


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (b"\x22\x05abc", "the message is malformed: field 4 is truncated"),
        (b"\x22\x02\xff\xfe", "not UTF-8"),
        (b"\x23", "group 4 has no end"),
        (b"\x26", "wire type 6"),
        (b"\x00\x01", "number 0"),
        (b"\x22" + b"\xff" * 11, "more than 10 bytes"),
        (b"\x2a\x07\x0a\x05\x52\x03abc", "in the middle of a number"),
    ],
)
def test_broken_messages_are_refused(wire: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        message_wire.parse(wire)


def test_a_tensor_that_contradicts_itself_is_told_when_it_is_read() -> None:
    short = GenericTensor("x", GrpsDataType.DT_INT32, (3,), {GrpsDataType.DT_INT32: np.arange(2)})
    with pytest.raises(InvalidArgument, match=r"'x' has shape \[3\] and 2 values"):
        _ = short.array
    wide = GenericTensor("x", GrpsDataType.DT_INT8, (1,), {GrpsDataType.DT_INT8: np.array([1000])})
    with pytest.raises(InvalidArgument, match="does not fit DT_INT8"):
        _ = wide.array
    with pytest.raises(InvalidArgument, match="data type 0"):
        _ = GenericTensor("x", 0, (0,)).array
    with pytest.raises(InvalidArgument, match="no tensor 'y'"):
        GrpsMessage(gtensors=[short]).tensor("y")


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="bin_data and str_data, not both"):
        message_wire.encode(GrpsMessage(bin_data=b"a", str_data="b"))
    with pytest.raises(InvalidArgument, match="complex64 is no GRPS data type"):
        GenericTensor.of("x", np.zeros(1, np.complex64))
    with pytest.raises(InvalidArgument, match="s_f cannot hold"):
        message_wire.encode(GrpsMessage(gmap=GenericMap(s_f={"a": 1e300})))


def test_half_floats_travel_as_floats() -> None:
    wire = message_wire.encode(GrpsMessage(gtensors=[GenericTensor.of("h", np.float16([1.5, -2]))]))  # type: ignore[arg-type]
    tensor = message_wire.parse(wire).tensor()
    assert tensor.dtype == GrpsDataType.DT_FLOAT16
    assert tensor.array.dtype == np.float16
    assert tensor.array.tolist() == [1.5, -2]
