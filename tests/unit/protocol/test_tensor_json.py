"""JSON arrays into tensors: strict about types and ranges, lenient about nesting."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from shmserve.protocol import bounds
from shmserve.protocol.oip import tensor_json
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES


def convert(text: str | bytes, datatype: str, count: int) -> bytes:
    raw = msgspec.Raw(text.encode() if isinstance(text, str) else text)
    tensor = tensor_json.decode(raw, DATATYPES[datatype], count, "inputs[0]")
    buffer = bytearray(tensor.nbytes)
    tensor.write(memoryview(buffer))
    return bytes(buffer)


def values(text: str, datatype: str, count: int) -> list[Any]:
    array = np.frombuffer(convert(text, datatype, count), DATATYPES[datatype].numpy)
    result: list[Any] = array.tolist()
    return result


@pytest.mark.parametrize("name", [n for n, d in DATATYPES.items() if d.numpy.kind in "iu"])
def test_integers_keep_every_bit_up_to_their_bounds(name: str) -> None:
    info = np.iinfo(DATATYPES[name].numpy)
    low, high = int(info.min), int(info.max)
    assert values(json.dumps([low, high, 0]), name, 3) == [low, high, 0]
    for wrong in (low - 1, high + 1, 1 << 70):
        with pytest.raises(InvalidArgument, match=r"inputs\[0\].data"):
            convert(json.dumps([0, wrong]), name, 2)


@pytest.mark.parametrize(
    ("text", "datatype", "message"),
    [
        ("[1.5]", "INT32", r"data\[0\] must be an integer from -2147483648 .*, got 1.5"),
        ("[1, 1.0]", "INT32", r"data\[1\] must be an integer"),
        ("[[1], [1e0]]", "INT64", r"data\[1\] must be an integer"),
        ("[true]", "INT32", r"data\[0\] must be an integer .*, got true"),
        ("[true]", "FP32", r"data\[0\] must be a number, got true"),
        ("[null]", "FP32", r"data\[0\] must be a number, got null"),
        ('["1"]', "FP64", r'data\[0\] must be a number, got "1"'),
        ("[1, 0]", "BOOL", r"data\[0\] must be true or false, got 1"),
        ('["true"]', "BOOL", r"data\[0\] must be true or false"),
        ("[1]", "BYTES", r"data\[0\] must be a string, got 1"),
        ("[null]", "BYTES", r"data\[0\] must be a string, got null"),
        ('[{"a": 1}]', "FP32", r"data\[0\] must be a number"),
        ("[NaN]", "INT32", r"data\[0\] must be an integer .*, got NaN"),
        ("3", "FP32", "data must be an array, got 3"),
        ("null", "FP32", "data must be an array, got null"),
        ('"abc"', "BYTES", "data must be an array"),
        ("{}", "FP32", "data must be an array"),
        ("[1e400]", "FP32", "out of range"),
        ("[1e400, NaN]", "FP64", "out of range"),
        ("[1" + "0" * 400 + "]", "FP64", "does not fit FP64"),
        ("[1, 2, 3]", "FP32", "has 3 elements, which is too many: its shape has 1"),
        ("[]", "FP32", "has 0 elements, which is too few: its shape has 1"),
        ('["\\ud800"]', "BYTES", "not valid Unicode"),
        (b'["\xff"]', "BYTES", "not UTF-8"),
    ],
)
def test_wrong_data_is_named(text: str | bytes, datatype: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(text, datatype, 1)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3, 4]",
        "[[1, 2], [3, 4]]",
        "[[1], [2, 3, 4]]",
        "[[[1, 2]], [[3, 4]]]",
        "[1, [2, [3]], 4]",
    ],
)
def test_nesting_is_flattened(text: str) -> None:
    assert values(text, "FP32", 4) == [1, 2, 3, 4]
    assert values(text, "UINT8", 4) == [1, 2, 3, 4]


def test_floats() -> None:
    assert values("[1, 0.1, -0.0, 1e-50]", "FP64", 4) == [1.0, 0.1, -0.0, 1e-50]
    assert values("[16777217, 1e39, -1e39]", "FP32", 3) == [16777216.0, math.inf, -math.inf]
    got = values("[NaN, Infinity, -Infinity, 1]", "FP32", 4)
    assert math.isnan(got[0])
    assert got[1:] == [math.inf, -math.inf, 1.0]


def test_strings_are_framed_utf8() -> None:
    assert convert('[["a"], ["\\u00e9", ""]]', "BYTES", 3) == bytes_codec.encode(["a", "é", ""])
    assert convert("[]", "BYTES", 0) == b""


def test_nesting_is_bounded() -> None:
    deep = bounds.MAX_JSON_NESTING
    assert values("[" * deep + "1" + "]" * deep, "FP32", 1) == [1.0]
    for depth in (deep + 1, 2000, 200_000):
        with pytest.raises(InvalidArgument, match=r"nesting depth exceeds .* \(100\)"):
            convert("[" * depth + "1" + "]" * depth, "FP32", 1)


def test_deeply_nested_numbers_and_empty_lists() -> None:
    cube = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    assert values(json.dumps(cube.tolist()), "FP32", 120) == cube.ravel().tolist()
    assert values("[[], [1], [[]], [2]]", "INT8", 2) == [1, 2]
    assert values("[[[true]], [false]]", "BOOL", 2) == [True, False]
    assert convert('[["["], [["]"]]]', "BYTES", 2) == bytes_codec.encode(["[", "]"])
