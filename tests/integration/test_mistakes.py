"""Common mistakes of users against a real server: each answer names the field, the given value,
and a remedy.

Mistakes at a start are in test_service.py, mistakes in models in test_broken_repository.py.
"""

import json
from typing import Any

import pytest

from tests.running_server import RunningServer

X: dict[str, Any] = {"name": "INPUT0", "datatype": "INT32", "shape": [16], "data": [0] * 16}
Y = {**X, "name": "INPUT1"}
WIDE = {"name": "INPUT0", "datatype": "FP32", "shape": [1 << 29]}

# The request's JSON (or bytes), the model, the status, and parts of the error text
MISTAKES: dict[str, tuple[Any, str, int, tuple[str, ...]]] = {
    "model": ({"inputs": [X, Y]}, "ad_sub", 404, ("'ad_sub' is not found", "index")),
    "JSON": (b'{"inputs": [{"name": "X",]}', "add_sub", 400, ("JSON", "at character 25")),
    "no JSON object": ([], "add_sub", 400, ("a JSON object", "got an array")),
    "no inputs": ({"input": [X]}, "add_sub", 400, ("has no 'inputs'",)),
    "name": (
        {"inputs": [X, {**Y, "name": "INPUT_1"}]},
        "add_sub",
        400,
        ("input 'INPUT_1'", "model 'add_sub'", "['INPUT0','INPUT1']"),
    ),
    "missing": ({"inputs": [X]}, "add_sub", 400, ("expected 2 inputs but got 1", "['INPUT1']")),
    "twice": ({"inputs": [X, Y, Y]}, "add_sub", 400, ("inputs[2]", "'INPUT1' already exists")),
    "shape": (
        {"inputs": [X, {**Y, "shape": [15]}]},
        "add_sub",
        400,
        ("input 'INPUT1'", "Expected [16], got [15]"),
    ),
    "datatype": (
        {"inputs": [X, {**Y, "datatype": "FP32"}]},
        "add_sub",
        400,
        ("'INPUT1' data-type is 'FP32'", "expects 'INT32'"),
    ),
    "no datatype": (
        {"inputs": [X, {**Y, "datatype": "float"}]},
        "add_sub",
        400,
        ("'float' for input INPUT1", "expects 'INT32'"),
    ),
    "value": (
        {"inputs": [X, {**Y, "data": [0] * 15 + [1.5]}]},
        "add_sub",
        400,
        ("inputs[1].data[15]", "an integer from -2147483648 to 2147483647, got 1.5"),
    ),
    "too few values": (
        {"inputs": [X, {**Y, "data": [0]}]},
        "add_sub",
        400,
        ("inputs[1].data has 1 elements", "its shape has 16"),
    ),
    "output": (
        {"inputs": [X, Y], "outputs": [{"name": "SUM"}]},
        "add_sub",
        400,
        ("output 'SUM'", "['OUTPUT0','OUTPUT1']"),
    ),
    "size": (
        {"inputs": [{**WIDE, "parameters": {"binary_data_size": 4 << 29}}]},
        "identity",
        413,
        ("INPUT0", str(4 << 29), "setting max_tensor_bytes"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_answer_says_what_would_do(server: RunningServer, mistake: str) -> None:
    document, model, status, words = MISTAKES[mistake]
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    told, _, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    text = json.loads(answer)["error"]
    assert told == status, text
    assert [word for word in words if word not in text] == [], text
