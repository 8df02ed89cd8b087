"""Models with a custom path, and models that take raw HTTP requests."""

from typing import Any

import pytest

from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.settings import GrpsSettings
from shmserve.tensor.spec import ModelSpec
from tests.unit.grps import models_of_grps as models
from tests.unit.grps.test_grps_frontend import OK, PREDICT, TEXT, Client, refused


def at(name: str, path: str, **parameters: str) -> ModelSpec:
    """A model that takes requests to a path as they are."""
    raw = {"grps_http_path": path, "grps_http_body": "true", "decoupled": "true"}
    told: Any = {**raw, **parameters}
    return models.spec(name, **told)


def chat(run: Any = models.http_echo, **parameters: Any) -> Client:
    return Client((at("chat", "/v1/chat", grps_version="1.0.0", **parameters), run))


def test_a_request_reaches_the_model_as_it_is() -> None:
    client = chat()
    answer = client.client.simulate_post(
        "/v1/chat", query_string="a=1&a=2&b=", body=b"\x00raw", headers={"Content-Type": "x/y"}
    )
    assert (answer.status_code, answer.content) == (201, b"POST \x00raw")
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["x-query"] == "(('a', '1'), ('a', '2'), ('b', ''))"
    head = custom_http.decode_request(client.request.inputs["http"].view)
    assert (head.method, head.path) == ("POST", "/v1/chat")
    assert ("Content-Type", "x/y") in head.headers
    assert client.client.simulate_get("/v1/chat").content == b"GET "
    assert all(call.closed for call in client.fake.calls)


def test_other_methods_and_paths() -> None:
    client = chat()
    assert client.client.simulate_put("/v1/chat").status_code == 405
    assert client.client.simulate_get("/v1/chat/more").json == {"error": "Not Found"}
    assert client.client.simulate_get("/v2/health/ready").status_code == 200


def test_predict_leads_there_as_well() -> None:
    answer = chat().client.simulate_post(PREDICT, body=b"anything")
    assert answer.content == b"POST anything"


def test_a_request_with_a_message_is_for_others() -> None:
    served = ((at("chat", "/c"), models.http_echo), (TEXT, models.echo))
    client = Client(*served, extensions={"grps": GrpsSettings(default_model="t-1")})
    assert client.post({"str_data": "x", "model": "t-1"}).json["str_data"] == "x"
    refused(client.post({"str_data": "x", "model": "chat-1"}), 400, "name it in the query")
    by_query = client.client.simulate_post(PREDICT, query_string="model=chat-1", body=b"x")
    assert by_query.content == b"POST x"


@pytest.mark.parametrize(
    ("mode", "key", "sent"),
    [
        ("query_param", "stream", {"query_string": "stream=true"}),
        ("header_param", "X-S", {"headers": {"X-S": "TRUE"}}),
        ("body_param", "stream", {"body": b'{"stream": true}'}),
    ],
)
def test_streams(mode: str, key: str, sent: dict[str, Any]) -> None:
    client = chat(grps_streaming_ctrl_mode=mode, grps_streaming_ctrl_key=key)
    answer = client.client.simulate_post("/v1/chat", **sent)
    assert answer.content == b"data: 1\n\ndata: 2\n\n"
    assert answer.headers["content-type"] == "text/event-stream"
    assert client.client.simulate_post("/v1/chat", body=b"{").content == b"POST {"


def test_header_names_with_underscores() -> None:
    heads: list[Any] = []

    def keeps(request: Any) -> Any:
        heads.append(custom_http.decode_request(request.inputs["http"].view))
        return models.http_echo(request)

    own = {"extras": {"shmserve.underscored": {"my_header_1": "a", "x_s": "true"}}}
    client = chat(keeps, grps_streaming_ctrl_mode="header_param", grps_streaming_ctrl_key="X_S")
    answer = client.client.simulate_post("/v1/chat", headers={"My-Header": "b"}, **own)
    assert answer.headers["content-type"] == "text/event-stream"
    assert {("My_Header_1", "a"), ("My-Header", "b")} <= set(heads[0].headers)


def test_failures_are_short_text(caplog) -> None:
    def defect(request: Any) -> Any:
        raise RuntimeError("/home/secret")

    def without_memory(request: Any) -> Any:
        raise MemoryError

    for run, status, text in (
        (models.refusing, 500, "the model said no"),
        (defect, 500, "internal server error"),
        (without_memory, 502, "the server ran out of memory while it had the request"),
    ):
        caplog.clear()
        answer = chat(run).client.simulate_post("/v1/chat", body=b"x")
        assert (answer.status_code, answer.text) == (status, text)
        assert len(caplog.records) == (run is not models.refusing)
        assert answer.headers["content-type"].startswith("text/plain")


def test_a_stream_that_fails_ends_with_the_text() -> None:
    def run(request: Any) -> Any:
        yield Outcome((OutputTensor("http_body", "UINT8", (1,), memoryview(b"1")),))
        models.refusing(request)

    answer = chat(run).client.simulate_post("/v1/chat", query_string="streaming=true")
    assert answer.text == "1the model said no"


@pytest.mark.parametrize(
    "head",
    [
        HttpAnswer(99),
        HttpAnswer(200, (("a b", "x"),)),
        HttpAnswer(200, (("X", "a\r\nb"),)),
        b"\xff\xff",
    ],
)
def test_heads_that_cannot_be_sent(head: Any) -> None:
    data = head if isinstance(head, bytes) else custom_http.encode(head)

    def run(request: Any) -> Any:
        yield Outcome((OutputTensor("http", "UINT8", (len(data),), memoryview(data)),))

    answer = chat(run).client.simulate_post("/v1/chat")
    assert answer.status_code == 500
    assert answer.text.startswith("the model")


def test_a_model_that_is_not_ready() -> None:
    client = chat()
    models.unready(client.fake, "chat")
    assert client.client.simulate_post("/v1/chat").status_code == 503


def test_a_second_path_for_messages() -> None:
    spec = models.message_spec(grps_http_path="/v1/second", grps_http_body="false")
    client = Client((spec, models.echo), (TEXT, models.echo))
    answer = client.client.simulate_post("/v1/second", json={"str_data": "x"})
    assert answer.json == {"status": OK, "str_data": "x"}
    assert client.fake.calls[-1].entry.spec.name == "your_model"


def test_models_come_and_go() -> None:
    client = Client((TEXT, models.echo))
    assert client.client.simulate_get("/v1/late").status_code == 404
    client.fake.functions["late"] = models.http_echo
    client.fake.put(at("late", "/v1/late"), models.ModelState.READY)  # type: ignore[attr-defined]
    assert client.client.simulate_get("/v1/late").content == b"GET "
    del client.fake.entries["late"]
    assert client.client.simulate_get("/v1/late").status_code == 404


def test_restricted_inference_covers_models_paths() -> None:
    restricted = ("inference:key=secret",)
    client = Client((at("c", "/c"), models.http_echo), http_restricted_api=restricted)
    assert client.client.simulate_post("/c").status_code == 403
    refused(client.client.simulate_post(PREDICT), 403)
    assert client.client.simulate_post("/c", headers={"key": "secret"}).status_code == 201
    assert client.get("health/live").status_code == 200


def test_a_body_too_large() -> None:
    client = Client((at("c", "/c"), models.http_echo), max_tensor_bytes=4)
    assert client.client.simulate_post("/c", body=b"12345").status_code == 413
