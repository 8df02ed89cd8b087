"""Inference over HTTP: JSON, binary, raw, receipts."""

from __future__ import annotations

import gzip
import json

import numpy as np

from shmserve.core.registry import ModelState
from shmserve.dispatch.outcome import Outcome
from shmserve.tensor import bytes_codec
from shmserve.testing import fake_models
from tests.unit.http_client import (
    BINARY,
    BINARY_OUT,
    INFER,
    VALUES,
    Body,
    Client,
    PlainBody,
    as_binary,
    as_json,
    error_of,
)


def test_json_in_and_out(client: Client) -> None:
    answer = client.infer({"id": "7", "inputs": [as_json([1, 2, 3, 4.5])]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "id": "7",
        "model_name": "identity",
        "model_version": "1",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4.5]}],
    }
    assert client.receipt.copied_in == client.receipt.copied_out == 16


def test_binary_in_and_out_copies_nothing(client: Client) -> None:
    answer = client.infer(BINARY, tail=VALUES)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.json["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert answer.tail == VALUES
    assert answer.streamed
    assert client.receipt.copied_in == client.receipt.copied_out == 0
    assert client.dispatcher.calls[-1].closed == 1


def test_what_came_with_the_head_counts_as_copied(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    body = Body(head + VALUES, copied=5)
    assert client.infer(BINARY, tail=VALUES, stream=body).status == 200
    assert client.receipt.copied_in == 5


def test_a_server_without_readinto_copies(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    answer = client.infer(BINARY, tail=VALUES, stream=PlainBody(head + VALUES))
    assert answer.tail == VALUES
    assert client.receipt.copied_in == 16


def test_two_binary_inputs_and_one_output_of_each_form(client: Client) -> None:
    a, b = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
    document = {
        "inputs": [
            {**as_binary(64, [16], "INT32"), "name": "INPUT1"},
            {**as_binary(64, [16], "INT32"), "name": "INPUT0"},
        ],
        "outputs": [{"name": "OUTPUT1", "parameters": {"binary_data": False}}, {"name": "OUTPUT0"}],
        "parameters": {"binary_data_output": True, "custom": "x"},
    }
    answer = client.infer(document, "/v2/models/add_sub/infer", b.tobytes() + a.tobytes())
    first, second = answer.json["outputs"]
    assert (first["name"], first["data"]) == ("OUTPUT1", (a - b).tolist())
    assert (second["name"], second["parameters"]) == ("OUTPUT0", {"binary_data_size": 64})
    assert answer.tail == (a + b).tobytes()
    request = client.dispatcher.calls[-1].request
    assert request is not None
    assert request.requested == ("OUTPUT1", "OUTPUT0")
    assert request.parameters == {"custom": "x"}


def test_json_and_binary_inputs_mix(client: Client) -> None:
    a = np.arange(16, dtype=np.int32)
    document = {
        "inputs": [
            {**as_json([1] * 16, datatype="INT32"), "name": "INPUT1"},
            as_binary(64, [16], "INT32"),
        ]
    }
    answer = client.infer(document, "/v2/models/add_sub/infer", a.tobytes())
    assert answer.json["outputs"][0]["data"] == (a + 1).tolist()


def test_empty_binary_output_is_plain_json(client: Client) -> None:
    answer = client.infer({"inputs": [as_json([], [0])], "outputs": BINARY_OUT})
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    assert answer.json["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_raw_requests(client: Client) -> None:
    raw = {"Inference-Header-Content-Length": "0"}
    answer = client.ask("POST", INFER, VALUES, raw)
    assert answer.tail == VALUES
    assert client.receipt.copied_in == 0
    strings = "/v2/models/word/infer"
    client.dispatcher.put(fake_models.spec("word", "BYTES", (1,)), ModelState.READY)
    client.dispatcher.functions["word"] = fake_models.identity
    assert client.ask("POST", strings, b"hello", raw).tail == bytes_codec.encode([b"hello"])
    packed = {**raw, "Content-Encoding": "gzip"}
    assert client.ask("POST", INFER, gzip.compress(VALUES), packed).tail == VALUES
    error_of(client.ask("POST", INFER, VALUES[:5], raw), 400)
    error_of(client.ask("POST", "/v2/models/add_sub/infer", VALUES, raw), 400)
    error_of(client.ask("POST", "/v2/models/identity_bytes/infer", b"hello", raw), 400)


def test_classification(client: Client) -> None:
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    answer = client.infer({"inputs": [as_json([1, 2, 3, 4.5])], "outputs": outputs})
    (output,) = answer.json["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2])
    assert output["data"] == ["4.500000:3", "3.000000:2"]
    outputs[0]["parameters"]["binary_data"] = True  # type: ignore[index]
    answer = client.infer({"inputs": [as_json([1, 2, 3, 4.5])], "outputs": outputs})
    assert answer.tail == bytes_codec.encode(["4.500000:3", "3.000000:2"])
    outputs[0]["parameters"] = {"classification": 0}
    answer = client.infer({"inputs": [as_json([1, 2])], "outputs": outputs})
    assert answer.json["outputs"][0]["data"] == [1, 2]


def test_a_model_may_give_no_outputs(client: Client) -> None:
    answer = client.infer({"inputs": [as_json([3])]}, "/v2/models/failing/infer")
    assert answer.json["outputs"] == []


def test_parameters_of_the_answer(client: Client) -> None:
    client.dispatcher.functions["identity"] = lambda request: Outcome((), {"a": 1})
    assert client.infer({"inputs": [as_json([1])]}).json["parameters"] == {"a": 1}


def test_receipt(client: Client) -> None:
    answer = client.infer(BINARY, tail=VALUES, headers={"shmserve-receipt": "1"})
    told = json.loads(answer.headers["shmserve-receipt"])
    assert told["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 0}
    assert told["ns"]["receive"] > 0
    assert told["executor"] == "fake/1/0"
    stages = [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert stages == ["receive", "queue", "compute", "send"]
    assert "shmserve-receipt" not in client.infer(BINARY, tail=VALUES).headers


def test_the_client_is_watched(client: Client) -> None:
    class Connection:
        def alive(self) -> bool:
            return True

    client.infer(BINARY, tail=VALUES, **{"shmserve.connection": Connection()})  # type: ignore[arg-type]
    client.infer(BINARY, tail=VALUES)
    watched, unwatched = (call.options.on_wait for call in client.dispatcher.calls)
    assert watched() is True
    assert unwatched is None
