"""Typed contents to tensor bytes: every datatype, wrong ones, large ones."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.errors import InvalidArgument
from shmserve.protocol.protobuf.infer_contents import Contents
from shmserve.protocol.protobuf.infer_wire import parse_request
from shmserve.protocol.protobuf.wire import encode_field
from shmserve.tensor.dtypes import DATATYPES

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
INTEGERS = [name for name in FIELDS if "INT" in name]


def contents(**fields: Any) -> Contents:
    """The contents of input IN of a request to model m."""
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="IN")
    tensor.contents.SetInParent()
    for name, values in fields.items():
        getattr(tensor.contents, name).extend(values)
    return contents_of(message.SerializeToString())


def contents_of(data: bytes) -> Contents:
    return parse_request(data).inputs[0].contents


def written(source: Contents, datatype: str, count: int) -> bytes:
    target = bytearray(source.nbytes(datatype, count))
    source.write(memoryview(target), datatype)
    return bytes(target)


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_from_lowest_to_highest(datatype: str) -> None:
    kind = DATATYPES[datatype].numpy
    info = np.iinfo(kind)
    values = [int(info.min), 0, 1, 127, int(info.max)]
    got = written(contents(**{FIELDS[datatype]: values}), datatype, 5)
    assert got == np.array(values, kind).tobytes()


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("BOOL", [True, False, True], b"\1\0\1"),
        ("FP32", [1.5, float("inf")], np.array([1.5, np.inf], "f4").tobytes()),
        ("FP64", [0.1, -0.0], np.array([0.1, -0.0]).tobytes()),
        ("BYTES", [b"", b"abc"], b"\0\0\0\0\3\0\0\0abc"),
    ],
)
def test_other_datatypes(datatype: str, values: list[Any], expected: bytes) -> None:
    assert written(contents(**{FIELDS[datatype]: values}), datatype, len(values)) == expected


@pytest.mark.parametrize("datatype", FIELDS)
def test_an_empty_tensor_needs_no_elements(datatype: str) -> None:
    assert written(contents(), datatype, 0) == b""


def test_any_varint_but_zero_is_true() -> None:
    data = bytes.fromhex("2a0b2a090a07 00 8000 ff01 8010".replace(" ", ""))
    assert written(contents_of(data), "BOOL", 4) == b"\0\0\1\1"


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT8", 128), ("INT8", -129), ("INT16", 1 << 15), ("UINT8", 256), ("UINT16", 1 << 16)],
)
def test_an_integer_that_does_not_fit_is_refused(datatype: str, value: int) -> None:
    source = contents(**{FIELDS[datatype]: [1, value]})
    with pytest.raises(InvalidArgument) as caught:
        written(source, datatype, 2)
    assert caught.value.message == (
        "explicit tensor data for input tensor 'IN' for model 'm': element 1 does not fit"
        f" {datatype}, got {value}"
    )


TYPED = "explicit tensor data for input tensor 'IN' for model 'm'"
SIZE = "input byte size mismatch for input 'IN' for model 'm'. Expected"
STRINGS = "string elements for inference input 'IN' for model 'm'"
BOTH = {"int_contents": [1], "fp32_contents": [1.0]}
FLOAT, UINT = {"fp32_contents": [1.0]}, {"uint_contents": [1]}


@pytest.mark.parametrize(
    ("fields", "datatype", "count", "message"),
    [
        (BOTH, "FP32", 1, f"unexpected {TYPED} of type 'INT32', expected datatype 'FP32'"),
        (UINT, "INT8", 1, f"unexpected {TYPED} of type 'UINT32', expected datatype 'INT8'"),
        (FLOAT, "FP16", 1, f"{TYPED}: datatype 'FP16' has no typed contents"),
        (FLOAT, "fp32", 1, f"{TYPED}: datatype 'fp32' is unknown"),
        ({"fp32_contents": [1.0] * 3}, "FP32", 4, f"{SIZE} 16, got 12"),
        ({"int_contents": [1000] * 5}, "INT32", 4, f"{SIZE} 16, got 20"),
        ({}, "INT64", 1, f"{SIZE} 8, got 0"),
        ({"bytes_contents": [b"a"]}, "BYTES", 2, f"expected 2 {STRINGS}, got 1"),
    ],
)
def test_contents_that_do_not_fit_the_input_are_refused(fields, datatype, count, message) -> None:
    with pytest.raises(InvalidArgument) as caught:
        contents(**fields).nbytes(datatype, count)
    assert caught.value.message == message


def test_packed_unpacked_and_split_elements_are_one_array() -> None:
    # contents {int_contents: 1 (unpacked), [300, -1] (packed), 2 (unpacked)}, then [5] in another
    minus = b"\xff" * 9 + b"\x01"
    first = b"\x10\x01" + b"\x12\x0c\xac\x02" + minus + b"\x10\x02"
    second = b"\x12\x01\x05"
    tensor = encode_field(0x2A, first) + encode_field(0x2A, second)
    source = contents_of(encode_field(0x2A, tensor))
    assert written(source, "INT32", 5) == np.array([1, 300, -1, 2, 5], "i4").tobytes()


def test_empty_packed_fields_of_other_datatypes_are_nothing() -> None:
    fields = encode_field(0x12, b"") + encode_field(0x32, bytes(4)) + encode_field(0x3A, b"")
    source = contents_of(encode_field(0x2A, encode_field(0x2A, fields)))
    assert written(source, "FP32", 1) == bytes(4)


def test_an_overlong_varint_among_packed_ones_is_refused() -> None:
    for size in (10, 1 << 20):  # also one longer than what is decoded at a time
        packed = b"\x80" * size + b"\x01"
        inner = encode_field(0x12, packed)
        source = contents_of(encode_field(0x2A, encode_field(0x2A, inner)))
        with pytest.raises(InvalidArgument, match="a varint of more than 10 bytes"):
            written(source, "INT32", 1)


@pytest.mark.parametrize("datatype", ["INT64", "UINT64", "INT32", "UINT16"])
def test_a_million_varints_of_all_lengths_in_bounded_memory(datatype: str) -> None:
    kind = DATATYPES[datatype].numpy
    rng = np.random.default_rng(11)
    bits = rng.integers(0, kind.itemsize * 8, 1_000_000, dtype=np.uint64)
    values = (rng.integers(0, 1 << 64, 1_000_000, dtype=np.uint64) >> (63 - bits)).astype(kind)
    source = contents(**{FIELDS[datatype]: values.tolist()})
    target = bytearray(source.nbytes(datatype, len(values)))
    tracemalloc.start()
    source.write(memoryview(target), datatype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(np.frombuffer(target, kind), values)
    assert peak < 24 << 20  # a block's room, for a tensor of any size
