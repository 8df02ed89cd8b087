"""Tensors and answers as JSON."""

import json

import msgspec
import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from shmserve.protocol.oip.answer import (
    BinarySize,
    InferAnswer,
    InferAnswerOutput,
    answer_parameters,
    encode,
    json_data,
)
from shmserve.tensor import bytes_codec


def as_json(array: np.ndarray, datatype: str) -> str:
    data = json_data(memoryview(array.tobytes()), datatype, array.shape, "OUT", "m")
    return msgspec.json.encode(data).decode()


def test_numbers_are_flat_and_exact() -> None:
    big = np.array([[1 << 63, (1 << 64) - 1]], np.uint64)
    assert as_json(big, "UINT64") == "[9223372036854775808,18446744073709551615]"
    assert as_json(np.array([[1], [-2]], np.int8), "INT8") == "[1,-2]"
    assert as_json(np.array([True, False]), "BOOL") == "[true,false]"
    assert np.float32(json.loads(as_json(np.array([0.1], np.float32), "FP32"))[0]) == np.float32(
        0.1
    )
    assert as_json(np.array([], np.float32), "FP32") == "[]"


def test_not_a_number_goes_out_as_a_bare_token() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1.5])
    assert as_json(array, "FP64") == "[NaN,Infinity,-Infinity,1.5]"
    assert as_json(array.astype(np.float32), "FP32") == "[NaN,Infinity,-Infinity,1.5]"


def test_a_bool_of_any_value_is_true() -> None:
    assert json_data(b"\x01\x00\x02", "BOOL", (3,), "OUT", "m") == [True, False, True]


def test_strings() -> None:
    data = bytes_codec.encode(["é", '"'])
    assert json_data(data, "BYTES", (2,), "OUT", "m") == ["é", '"']
    with pytest.raises(InvalidArgument, match="binary data format for output OUT"):
        json_data(bytes_codec.encode([b"\xff"]), "BYTES", (1,), "OUT", "m")


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json_form(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"sending {datatype} data via JSON is not supported"):
        json_data(b"\0\0", datatype, (1,), "OUT", "m")


def test_an_answer_leaves_out_what_is_not_there() -> None:
    outputs = [
        InferAnswerOutput("A", "FP32", (1,), data=[1.0]),
        InferAnswerOutput("B", "FP32", (1,), BinarySize(4)),
        InferAnswerOutput("C", "FP32", (1,)),
    ]
    answer = json.loads(encode(InferAnswer("m", "1", outputs)))
    assert answer == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "A", "datatype": "FP32", "shape": [1], "data": [1.0]},
            {"name": "B", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "C", "datatype": "FP32", "shape": [1]},
        ],
    }


def test_parameters_may_be_infinite() -> None:
    assert answer_parameters({"a": True, "b": 1.5}) == {"a": True, "b": 1.5}
    assert encode(answer_parameters({"a": float("nan")})) == b'{"a": NaN}'
