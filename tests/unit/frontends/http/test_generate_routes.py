"""generate and generate_stream over the fake dispatcher."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import Code, ModelFailure, Unavailable
from shmserve.protocol import bounds
from shmserve.tensor import bytes_codec
from tests.fake_dispatch import FakeRequest
from tests.fake_models import array_of, tensor_of
from tests.unit.http_client import Answer, Client, error_of


def generate(client: Client, model: str, document: Any) -> Answer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return client.ask("POST", f"/v2/models/{model}/generate", body)


def count_up(request: FakeRequest) -> Iterator[Outcome]:
    for i in range(int(array_of(request.inputs["INPUT0"])[0])):
        yield Outcome((tensor_of("OUTPUT0", "INT32", np.array([i], np.int32)),))


def streaming(client: Client, function: Any) -> None:
    client.dispatcher.functions["decoupled"] = function


def events(client: Client, document: Any, status: int = 200) -> list[Any]:
    """Return the events of a stream, and check that the body gives its resources back."""
    path = "/v2/models/decoupled/generate_stream"
    answer = client.ask("POST", path, json.dumps(document).encode())
    assert answer.status == status
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    body = answer.body.decode()
    return [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n") if event]


# ----------------------------------------------------------------- requests


def test_lists_scalars_and_parameters(client: Client) -> None:
    document = {"INPUT0": [1, 2], "id": "a", "t": 0.5, "parameters": {"k": 3, "stop": True}}
    answer = generate(client, "identity", document)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    told = {"model_name": "identity", "model_version": "1", "id": "a", "OUTPUT0": [1.0, 2.0]}
    assert answer.json == told
    assert client.request.id == "a"
    assert client.request.parameters == {"t": 0.5, "k": 3, "stop": True}
    assert generate(client, "identity", {"INPUT0": 7}).json["OUTPUT0"] == 7.0


@pytest.mark.parametrize(
    ("model", "value", "shape"),
    [
        ("identity", 1, (1,)),
        ("identity", [1, 2, 3], (3,)),
        ("identity", [], (0,)),
        ("identity_2d", [[1, 2, 3, 4]], (1, 4)),
        ("identity_bytes", "text", (1,)),
        ("identity_bytes", ["a", "b"], (2,)),
        ("identity_bool", True, (1,)),
        ("batched", [1, 2, 3, 4], (1, 4)),
        ("batched", [[1, 2, 3, 4], [5, 6, 7, 8]], (2, 4)),
        ("batched", list(range(8)), (2, 4)),
        ("identity_2d", [1, 2, 3, 4], (1, 4)),
        ("identity_2d", list(range(12)), (3, 4)),
    ],
)
def test_shapes(client: Client, model: str, value: Any, shape: tuple[int, ...]) -> None:
    assert generate(client, model, {"INPUT0": value}).status == 200
    assert client.request.inputs["INPUT0"].shape == shape


CONVERTING = "Converting keyword: 'parameters': parameter 'nested' has invalid type."


def within(parameters: Any) -> dict[str, Any]:
    return {"INPUT0": 1, "parameters": parameters}


@pytest.mark.parametrize(
    ("model", "document", "reason"),
    [
        ("identity", b"[1]", "must be a JSON object"),
        ("identity", b"{", "failed to parse"),
        ("identity", {}, "missing required input"),
        ("identity", {"INPUT0": "a"}, "INPUT0"),
        ("identity", {"INPUT0": None}, "INPUT0"),
        ("identity", {"INPUT0": {"a": 1}}, "INPUT0"),
        ("identity_2d", {"INPUT0": [[1], [2, 3]]}, "different lengths"),
        ("identity", {"INPUT0": [1, [2]]}, "INPUT0"),
        ("identity", {"INPUT0": 1, "id": 5}, "id must be a string"),
        ("identity", {"INPUT0": 1, "other": [1]}, "parameter 'other' has invalid type"),
        ("identity", within(5), "Expected JSON object for keyword: 'parameters', got 5"),
        (
            "identity",
            within({"nested": {"a": 1}}),
            CONVERTING,
        ),
        ("identity", within({"INPUT0": 2}), "input 'INPUT0' already exists in request"),
        ("identity", b'{"INPUT0": 1, "INPUT0": 2}', "input 'INPUT0' already exists in request"),
        ("identity", {"INPUT0": 1, "triton_x": 2}, "reserved"),
        ("identity_fp16", {"INPUT0": 1}, "FP16"),
        ("batched", {"INPUT0": 1}, "unexpected shape"),
        ("batched", {"INPUT0": [1, 2, 3]}, "unexpected shape"),
    ],
)
def test_what_is_wrong_is_named(client: Client, model: str, document: Any, reason: str) -> None:
    assert reason in error_of(generate(client, model, document), 400)
    assert not client.dispatcher.calls or client.dispatcher.calls[-1].closed


def test_limits(client: Client, monkeypatch) -> None:
    monkeypatch.setattr(bounds, "MAX_INPUTS", 2)
    small = Client(Settings(max_json_bytes=20))
    text = error_of(generate(small, "identity", {"INPUT0": [1] * 20}), 413)
    assert (
        "request JSON size of 72 bytes exceeds the maximum allowed input size of 20 bytes" in text
    )
    assert "exceeds the maximum allowed value of 20 bytes (setting max_json_bytes)" in text
    many = generate(client, "identity", {"INPUT0": 1, "a": 1, "b": 2, "c": 3})
    assert "at most 2 are allowed" in error_of(many, 400)
    error_of(generate(client, "nosuch", {"INPUT0": 1}), 404)


# ------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [([1.5], 1.5), ([float("nan")], "NaN"), ([float("inf"), 1], "[Infinity,1.0]"), ([], [])],
)
def test_numbers(client: Client, outcome: list[float], expected: Any) -> None:
    array = np.array(outcome, np.float32)
    client.dispatcher.functions["identity"] = lambda _: Outcome(
        (tensor_of("OUTPUT0", "FP32", array),), {"p": float("inf")}
    )
    answer = generate(client, "identity", {"INPUT0": 1})
    assert answer.status == 200
    text = answer.body.decode()
    assert '"p":Infinity' in text
    if isinstance(expected, str):
        assert f'"OUTPUT0":{expected}' in text
    else:
        assert answer.json["OUTPUT0"] == expected


def test_bytes_that_are_no_text(client: Client) -> None:
    data = memoryview(bytes_codec.encode([b"\xff\xfe"]))
    client.dispatcher.functions["identity_bytes"] = lambda _: Outcome(
        (OutputTensor("OUTPUT0", "BYTES", (1,), data),)
    )
    text = error_of(generate(client, "identity_bytes", {"INPUT0": "x"}), 400)
    assert "no UTF-8" in text
    assert "OUTPUT0" in text


def test_generate_wants_exactly_one_answer(client: Client) -> None:
    streaming(client, count_up)
    assert generate(client, "decoupled", {"INPUT0": 1}).json["OUTPUT0"] == 0
    assert "more than one" in error_of(generate(client, "decoupled", {"INPUT0": 2}), 400)
    assert "none" in error_of(generate(client, "decoupled", {"INPUT0": 0}), 400)


def test_a_models_error_has_its_status(client: Client) -> None:
    error_of(generate(client, "failing", {"INPUT0": 1}), 500)

    def missing(request: FakeRequest) -> Iterator[Outcome]:
        yield Outcome(error=ModelFailure("nothing of that name", Code.NOT_FOUND))

    streaming(client, missing)
    assert error_of(generate(client, "decoupled", {"INPUT0": 1}), 404) == "nothing of that name"
    assert events(client, {"INPUT0": 1}, 404) == [{"error": "nothing of that name"}]
    answer = client.ask("POST", "/v2/models/decoupled/generate_stream", b"{}")
    assert answer.headers["content-type"] == "application/json"
    assert "missing required input" in error_of(answer, 400)


def test_a_stream_of_events(client: Client) -> None:
    streaming(client, count_up)
    assert [event["OUTPUT0"] for event in events(client, {"INPUT0": 3})] == [0, 1, 2]
    assert events(client, {"INPUT0": 0}) == []


def test_errors_in_the_midst_of_a_stream(client: Client) -> None:
    def mixed(request: FakeRequest) -> Iterator[Outcome]:
        yield from count_up(request)
        yield Outcome(error=ModelFailure("this one is missing"))
        yield from count_up(request)
        raise Unavailable("the executor died")

    streaming(client, mixed)
    first, missing, second, last = events(client, {"INPUT0": 1})
    assert first == second
    assert missing == {"error": "this one is missing"}
    assert last == {"error": "the executor died"}


def test_ordinary_models_stream_one_event(client: Client) -> None:
    client.dispatcher.functions["decoupled"] = client.dispatcher.functions["identity"]
    (event,) = events(client, {"INPUT0": 5, "id": "z"})
    assert event == {"model_name": "decoupled", "model_version": "1", "id": "z", "OUTPUT0": 5}


def test_what_cannot_run_or_be_told_is_counted(client: Client) -> None:
    assert generate(client, "identity", b"{").status == 400
    assert client.dispatcher.refusals == [("identity", "InvalidArgument")]
    streaming(client, count_up)
    error_of(generate(client, "decoupled", {"INPUT0": 2}), 400)  # more than one answer
    assert client.dispatcher.calls[-1].outcomes == ["InvalidArgument"]
