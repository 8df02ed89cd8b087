"""Health, metadata, paths and errors over the fake dispatcher."""

import logging
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.errors import Code, ExecutorLost, ModelFailure, QueueFull
from shmserve.tensor import bytes_codec
from tests import fake_models
from tests.log_lines import log_lines
from tests.unit.http_client import (
    BINARY,
    BINARY_OUT,
    INFER,
    VALUES,
    Client,
    as_binary,
    as_json,
    error_of,
)


def test_server_metadata(client: Client) -> None:
    answer = client.get("/v2")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["name"] == "shmserve"
    assert {"binary_tensor_data", "schedule_policy"} <= set(answer.json["extensions"])
    named = Client(Settings(server_name="triton"))
    assert named.get("/v2").json["name"] == "triton"


def test_model_metadata_and_config(client: Client) -> None:
    for path in ("/v2/models/batched", "/v2/models/batched/versions/1"):
        assert client.get(path).json == {
            "name": "batched",
            "versions": ["1"],
            "platform": "python",
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
        }
        assert client.get(f"{path}/config").json["max_batch_size"] == 8
        assert client.get(f"{path}/ready").json == {"name": "batched", "ready": True}


def test_health(client: Client) -> None:
    assert client.get("/v2/health/live").json == {"live": True}
    assert client.get("/v2/health/ready").json == {"ready": True}
    assert client.ask("HEAD", "/v2/health/ready").status == 200
    client.dispatcher.draining = True
    told = error_of(client.get("/v2/health/ready"), 503)
    assert told == "the server is not ready: it is about to stop"
    client.dispatcher.published = False
    error_of(client.get("/v2/health/ready"), 503)
    assert client.get("/v2/health/live").status == 200


def test_a_model_that_is_not_ready(client: Client) -> None:
    client.dispatcher.put(fake_models.spec("identity", "FP32", (-1,)), ModelState.LOADING)
    error_of(client.get("/v2/models/identity/ready"), 503)
    answer = client.get("/v2/health/ready")
    assert error_of(answer, 503) == "the server is not ready: 'identity' version 1 is loading"
    assert answer.headers["retry-after"] == "1"
    assert "not at ready state" in error_of(client.infer({"inputs": []}), 503)


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v2/",
        "/v2/health",
        "/v2/nosuch",
        "//v2",
        "///v2/health/live",
        "//v2/models/identity",
        "/v2//health/live",
        "//",
        "/v2/models",
        "/v2/models/",
        "/v2/models/identity/",
        "/v2/models/nosuch",
        "/v2/models/nosuch/config",
        "/v2/models/nosuch/ready",
        "/v2/models/identity/versions/7/ready",
        "/v2/models/identity/versions/x",
        "/v2/models/identity/versions/",
        "/v2/models/identity/versions//config",
        "/v2/systemsharedmemory/region//status",
        "/v2/models/identity/versions/-1",
        "/v2/models/identity/versions/1.0/config",
        "/v2/models/identity/versions/" + "9" * 5000,
        "/v2/models/identity/versions/\u00b2",
        "/v2/models/a/b/infer",
    ],
)
def test_paths_that_lead_nowhere(client: Client, path: str) -> None:
    error_of(client.get(path), 404)


def test_errors_of_the_routes_read_like_tritons(client: Client) -> None:
    assert error_of(client.get("/v2/nosuch"), 404) == "Not Found"
    assert error_of(client.get(INFER), 405) == "Method Not Allowed"
    for method, path in (("PUT", INFER), ("POST", "/v2/health/live"), ("DELETE", "/v2")):
        answer = client.ask(method, path)
        error_of(answer, 405)
        assert answer.headers["allow"]


def test_options_tells_the_methods(client: Client) -> None:
    answer = client.ask("OPTIONS", INFER)
    assert (answer.status, answer.headers["allow"]) == (200, "POST")


def test_unknown_models_and_decoupled_ones(client: Client) -> None:
    document = {"inputs": [as_json([1])]}
    text = error_of(client.infer(document, "/v2/models/nosuch/infer"), 404)
    assert text.startswith("Request for unknown model")
    error_of(client.infer(document, "/v2/models/identity/versions/9/infer"), 404)
    assert client.infer(document, "/v2/models/identity/versions/1/infer").status == 200
    error_of(client.infer(document, "/v2/models/decoupled/infer"), 501)


def test_errors_of_models(client: Client) -> None:
    path = "/v2/models/failing/infer"
    assert "boom raised" in error_of(client.infer({"inputs": [as_json([1])]}, path), 500)
    assert "boom returned" in error_of(client.infer({"inputs": [as_json([2])]}, path), 400)


@pytest.mark.parametrize(("code", "status"), [(Code.UNKNOWN, 500), (Code.CANCELLED, 499)])
def test_a_models_code_has_its_status(client: Client, code: Code, status: int) -> None:
    client.fail(ModelFailure("not now", code))
    assert error_of(client.infer({"inputs": [as_json([1])]}), status) == "not now"


def test_unexpected_errors_show_nothing(client: Client, caplog) -> None:
    with caplog.at_level(logging.ERROR):
        answer = client.infer({"inputs": [as_json([5])]}, "/v2/models/failing/infer")
    assert error_of(answer, 500) == "internal server error"
    assert "a secret of" in caplog.text


def test_a_lack_of_memory_is_no_bug(client: Client, caplog) -> None:
    answer = client.infer({"inputs": [as_json([6])]}, "/v2/models/failing/infer")
    assert error_of(answer, 502) == "the server ran out of memory while it had the request"
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("WARNING", None)]


def test_a_failure_is_one_line_with_an_id_that_the_client_has(client: Client, caplog) -> None:
    path = "/v2/models/failing/infer"
    answer = client.infer({"inputs": [as_json([1])]}, path, headers={"X-Request-ID": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (line,) = log_lines(caplog)
    assert line.startswith(f"POST {path} failed status=500 request=mine-7 error=")
    assert "boom raised" in line
    caplog.clear()
    made = client.infer({"inputs": [as_json([5])]}, path).headers["x-request-id"]
    assert len(made) == 16
    assert len(caplog.records) == 1
    assert f"failed status=500 request={made} error=unexpected error" in log_lines(caplog)[0]
    caplog.clear()
    refused = client.infer({"inputs": [as_json([2])]}, path)  # a client's own fault is no line
    assert (refused.status, len(refused.headers["x-request-id"]), caplog.messages) == (400, 16, [])


def test_an_id_that_was_brought_goes_with_the_answer_and_nothing_else_does(client: Client) -> None:
    assert "x-request-id" not in client.infer(BINARY, tail=VALUES).headers
    for given, kept in (("a-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)):
        answer = client.infer(BINARY, tail=VALUES, headers={"X-Request-ID": given})
        assert (answer.headers["x-request-id"] == given) is kept


def test_no_line_of_the_log_is_a_clients(client: Client, caplog) -> None:
    client.fail(ModelFailure("one\nforged line"))
    client.infer(BINARY, tail=VALUES)
    assert "\n" not in log_lines(caplog)[-1]
    assert "one\\nforged line" in log_lines(caplog)[-1]


def test_what_no_retry_mends_says_nothing_of_one(client: Client) -> None:
    refused = client.ask("POST", "/v2/repository/models/identity/load")
    assert (refused.status, "retry-after" in refused.headers) == (503, False)
    client.fail(ExecutorLost("it died"))
    answer = client.infer(BINARY, tail=VALUES)
    error_of(answer, 502)
    assert "retry-after" not in answer.headers


def test_a_full_server_says_when_to_come_back(client: Client) -> None:
    client.dispatcher.budget = 10
    answer = client.infer(BINARY, tail=VALUES)
    error_of(answer, 503)
    assert answer.headers["retry-after"] == "1"
    client.dispatcher.budget = None
    client.fail(QueueFull("the queue is full"))
    assert client.infer(BINARY, tail=VALUES).headers["retry-after"] == "1"


def test_regions_are_recognised_and_not_found(client: Client) -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    source = {"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": parameters}
    assert "'r'" in error_of(client.infer({"inputs": [source]}), 404)
    outputs = [{"name": "OUTPUT0", "parameters": parameters}]
    error_of(client.infer({"inputs": [as_json([1])], "outputs": outputs}), 404)
    outputs = [{"name": "OUTPUT0", "parameters": {**parameters, "classification": 1}}]
    error_of(client.infer({"inputs": [as_json([1])], "outputs": outputs}), 400)


@pytest.mark.parametrize("kind", ["system", "cuda"])
@pytest.mark.parametrize("action", ["register", "unregister"])
def test_an_empty_name_stands_for_no_region_and_not_for_all(client: Client, kind, action) -> None:
    error_of(client.ask("POST", f"/v2/{kind}sharedmemory/region//{action}", b"{}"), 404)


def test_strings_without_a_json_form_must_be_asked_for_in_binary(client: Client) -> None:
    data = bytes_codec.encode([b"\xff"])
    document: dict[str, Any] = {"inputs": [as_binary(len(data), [1], "BYTES")]}
    path = "/v2/models/identity_bytes/infer"
    assert "binary data format" in error_of(client.infer(document, path, data), 400)
    document["outputs"] = BINARY_OUT
    assert client.infer(document, path, data).tail == data


def test_json_tokens_survive(client: Client) -> None:
    text = b'{"inputs":[{"name":"INPUT0","shape":[3],"datatype":"FP32","data":[NaN,Infinity,1]}]}'
    answer = client.infer(text)
    assert b'"data":[NaN,Infinity,1.0]' in answer.body
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(answer.body)
