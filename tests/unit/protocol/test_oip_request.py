"""The JSON part of requests: accepted fields, and errors that name the field."""

import json
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge
from shmserve.protocol import bounds
from shmserve.protocol.oip.request import InferInput, InferOutput, RegionWindow, parse_request

LIMITS = Settings()
INPUT = {"name": "I", "shape": [1], "datatype": "FP32"}


def request(**fields: Any) -> bytes:
    return json.dumps({"inputs": [{**INPUT, "data": [1]}], **fields}).encode()


def with_input(**fields: Any) -> bytes:
    return json.dumps({"inputs": [{**INPUT, **fields}]}).encode()


def output(**parameters: Any) -> dict[str, Any]:
    return {"outputs": [{"name": "O", "parameters": parameters}]}


def parse_input(**fields: Any) -> InferInput:
    (parsed,) = parse_request(with_input(**fields), LIMITS).inputs
    return parsed


def test_a_whole_request() -> None:
    text = request(
        id="7",
        parameters={"binary_data_output": True, "custom": 1.5, "sequence_id": "s"},
        outputs=[
            {"name": "A"},
            {"name": "B", "parameters": {"binary_data": False, "classification": 3}},
            {
                "name": "C",
                "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8},
            },
        ],
        model_name="ignored",
    )
    parsed = parse_request(text, LIMITS)
    assert parsed.id == "7"
    assert parsed.binary_output
    assert parsed.parameters == {"custom": 1.5, "sequence_id": "s"}
    assert parsed.outputs == (
        InferOutput("A"),
        InferOutput("B", 3, False),
        InferOutput("C", region=RegionWindow("r", 0, 8)),
    )
    (source,) = parsed.inputs
    assert (source.name, source.shape, source.datatype) == ("I", (1,), "FP32")
    assert isinstance(source.data, msgspec.Raw)


def test_the_three_sources_of_data() -> None:
    assert parse_input(parameters={"binary_data_size": 0}).binary_size == 0
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": 8}
    assert parse_input(parameters=region).region == RegionWindow("r", 8, 4)
    assert parse_input(data=[]).data is not None


def test_an_empty_list_is_data_on_the_slow_path_too() -> None:
    text = b'{"inputs":[{"name":"I","shape":[0],"datatype":"FP32","data":[]}],"foo":NaN}'
    (source,) = parse_request(text, LIMITS).inputs
    assert source.data == []


def test_tokens_that_are_no_json_are_numbers() -> None:
    text = with_input(shape=[3], data=[float("nan"), float("inf"), -float("inf")])
    (source,) = parse_request(text, LIMITS).inputs
    assert isinstance(source.data, list)
    assert len(source.data) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": {"name": "I"}}, "inputs must be an array, got an object"),
        ({"inputs": None}, "inputs must be an array, got null"),
        ({"inputs": [5]}, r"inputs\[0\] must be an object, got 5"),
        ({"outputs": {}}, "outputs must be an array, got an object"),
        ({"outputs": [{}]}, r"outputs\[0\] has no 'name'"),
        ({"outputs": [{"name": 1}]}, r"outputs\[0\].name must be a string, got 1"),
        ({"outputs": [{"name": "O"}, {"name": "O"}]}, "output 'O' already exists in request"),
        ({"outputs": [{"name": "O"}, {"name": "O"}]}, "Duplicate output name 'O' is not allowed"),
        (
            output(binary_data=1),
            r"outputs\[0\].parameters.binary_data must be true or false, got 1",
        ),
        (
            output(classification="2"),
            r'outputs\[0\].parameters.classification must be a non-negative integer, got "2"',
        ),
        (output(classification=-1), "classification must be a non-negative integer, got -1"),
        ({"id": None}, "id must be a string, got null"),
        ({"id": 7}, "id must be a string, got 7"),
        ({"parameters": [1]}, "parameters must be an object, got an array"),
        ({"parameters": {"a": {"b": 1}}}, "parameter 'a' has invalid type"),
        ({"parameters": {"a": None}}, "parameter 'a' has invalid type"),
        ({"parameters": {"triton_x": 1}}, "'triton_' are reserved for Triton usage"),
        ({"parameters": {"priority": -1}}, "'priority' must be a non-negative integer, got -1"),
        ({"parameters": {"priority": True}}, "'priority' must be a non-negative integer"),
        ({"parameters": {"timeout": "x"}}, "'timeout' must be a non-negative integer, got 'x'"),
        ({"parameters": {"timeout": 1.0}}, "'timeout' must be a non-negative integer, got 1.0"),
        ({"parameters": {"sequence_id": -5}}, "'sequence_id' must be a non-negative integer or"),
        ({"parameters": {"sequence_start": 1}}, "'sequence_start' must be true or false, got 1"),
        ({"parameters": {"binary_data_output": 0}}, "'binary_data_output' must be true or false"),
        ({"parameters": {"huge": 1 << 64}}, "'huge' does not fit 64 bits"),
    ],
)
def test_wrong_fields_of_a_request(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_request(request(**fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": 5}, r"inputs\[0\].name must be a string, got 5"),
        ({"shape": "1"}, r'inputs\[0\].shape must be an array, got "1"'),
        ({"shape": [2, -5]}, r"inputs\[0\].shape\[1\] must be a non-negative integer, got -5"),
        ({"shape": [1.5]}, r"inputs\[0\].shape\[0\] must be a non-negative integer, got 1.5"),
        ({"shape": [1.0]}, r"inputs\[0\].shape\[0\] must be a non-negative integer, got 1.0"),
        ({"shape": [True]}, r"inputs\[0\].shape\[0\] must be a non-negative integer, got true"),
        ({"shape": [1 << 63]}, r"inputs\[0\].shape\[0\] must be at most 9223372036854775807"),
        ({"datatype": 5}, r"inputs\[0\].datatype must be a string, got 5"),
        ({"parameters": [1]}, r"inputs\[0\].parameters must be an object, got an array"),
        ({}, "But no field is set"),
        (
            {"data": [1], "parameters": {"binary_data_size": 4, "shared_memory_region": "r"}},
            "But set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
        ({"parameters": {"shared_memory_offset": 0}}, "But no field is set"),
        ({"parameters": {"shared_memory_region": "r"}}, "needs 'shared_memory_byte_size'"),
        ({"parameters": {"binary_data_size": "16"}}, r"binary_data_size must be .* got \"16\""),
        ({"parameters": {"binary_data_size": 16.0}}, "binary_data_size must be .* got 16.0"),
        ({"parameters": {"binary_data_size": -1}}, "binary_data_size must be .* got -1"),
        (
            {"parameters": {"shared_memory_region": 1, "shared_memory_byte_size": 1}},
            "shared_memory_region must be a string, got 1",
        ),
    ],
)
def test_wrong_fields_of_an_input(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_input(**fields)


@pytest.mark.parametrize("key", ["name", "shape", "datatype"])
def test_missing_fields_are_named(key: str) -> None:
    fields = {k: v for k, v in {**INPUT, "data": [1]}.items() if k != key}
    with pytest.raises(InvalidArgument, match=rf"inputs\[0\] has no '{key}'"):
        parse_request(json.dumps({"inputs": [fields]}).encode(), LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b'{"inputs": [',
        b"{}",
        b"[]",
        b'"x"',
        b"null",
        b"nonsense",
        b'{"inputs": []} x',
        b'{"inputs": [], "id": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"inputs": []}'.encode("utf-16"),
        b'{"inputs": [], "id": "\\ud800"}',
        b'{"inputs": [], "x": ' + b"1" * 5000 + b', "id": 5}',
        b'{"inputs": [], "x": 1e999, "id": NaN}',
        b'{"inputs": [], "x": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b"[" * 100000,
        b'{"a":' * 100000,
        b"\0",
    ],
)
def test_malformed_texts(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_request(text, LIMITS)


def test_limits(monkeypatch) -> None:
    limits = Settings(max_json_bytes=20)
    with pytest.raises(TooLarge, match="request JSON size of 21 bytes"):
        parse_request(b" " * 21, limits)
    monkeypatch.setattr(bounds, "MAX_INPUTS", 2)
    many = json.dumps({"inputs": [{**INPUT, "name": str(i), "data": []} for i in range(3)]})
    with pytest.raises(InvalidArgument, match="has 3 inputs"):
        parse_request(many.encode(), LIMITS)
    with pytest.raises(InvalidArgument, match="has 3 parameters"):
        parse_request(request(parameters=dict.fromkeys("abc", 1)), LIMITS)


def test_brackets_in_strings_are_not_nesting() -> None:
    text = json.dumps({"inputs": [], "id": '[{"\\' * 200, "x": 1}).encode()
    assert parse_request(text.replace(b'"x": 1', b'"x": NaN'), LIMITS).id == '[{"\\' * 200
