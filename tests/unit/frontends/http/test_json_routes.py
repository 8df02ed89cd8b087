"""POST /models/{m} over the fake dispatcher: bodies, forms, streams, the OpenAPI document."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from openapi_spec_validator import validate

from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.http.routes.inference import form_parts
from shmserve.protocol.oip import json_calls
from shmserve.protocol.oip.json_calls import MAX_PARTS
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import TensorSpec
from tests import fake_dispatch, fake_models
from tests.fake_dispatch import FakeRequest
from tests.unit.http_client import Client, error_of

HOSTILE = {"type": "string"}
SCHEMAS = json_calls.JsonCallSchemas(
    "Doubles a number",
    {"$ref": "#/components/schemas/echo.Body"},
    {"type": "integer"},
    ("image",),
    {"echo.Body": {"type": "object"}, "Error": HOSTILE},
)


def echo(request: FakeRequest) -> Outcome:
    return Outcome((request.inputs["json"],))


def stream(request: FakeRequest) -> Iterator[Outcome]:
    for number in range(3):
        if number == 2 and request.inputs["json"].view[4:] == b"fail":
            raise ModelFailure("no third")
        view = memoryview(bytes_codec.encode([str(number)]))
        yield Outcome((OutputTensor("json", "BYTES", (1,), view),))


def spec(name: str, decoupled: bool = False, media: str = "") -> Any:
    made = fake_models.spec(name, "BYTES", (1,), decoupled=decoupled)
    tensor = (TensorSpec("json", "BYTES", (1,)),)
    parameters = {
        json_calls.SCHEMA_PARAMETER: json_calls.encode_schemas(replace(SCHEMAS, media=media))
    }
    return replace(made, inputs=tensor, outputs=tensor, parameters=parameters)


def make_client(**settings: Any) -> Client:
    client = Client(Settings(**settings))
    models = [*fake_models.models(), (spec("echo"), echo), (spec("stream", True), stream)]
    models += [(spec(name), echo) for name in ("a-b", "a_b", "name")]
    models.append((spec("picture", media="image/png"), echo))
    other = fake_dispatch.FakeDispatcher(models)
    vars(client.dispatcher).update(vars(other))
    return client


@pytest.fixture
def client() -> Client:
    return make_client()


def form(*parts: tuple[str, bytes], boundary: str = "limit") -> tuple[bytes, str]:
    """Return body and Content-Type of a form."""
    pieces = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, content in parts
    ]
    return b"".join(pieces) + f"--{boundary}--\r\n".encode(), (
        f"multipart/form-data; boundary={boundary}"
    )


@pytest.mark.parametrize("body", [b'{"a": 1}', b" " * 100_000])
def test_the_body_goes_to_the_model_as_it_is(client: Client, body: bytes) -> None:
    answer = client.ask("POST", "/models/echo", body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == body
    assert answer.streamed, "sent from the slot"
    assert client.dispatcher.calls[-1].outcomes == ["answered"]


def test_bodies_of_unknown_length(client: Client) -> None:
    chunked: dict[str, Any] = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}
    assert client.ask("POST", "/models/echo", b"[1]", **chunked).body == b"[1]"
    headers = {"Content-Encoding": "gzip"}
    assert client.ask("POST", "/models/echo", gzip.compress(b"[1]"), headers).body == b"[1]"


def test_forms(client: Client) -> None:
    body, kind = form(("image", b"\x00\r\n--limi"), ("n", b"3"))
    answer = client.ask("POST", "/models/echo", body, CONTENT_TYPE=kind)
    assert json_calls.is_form(answer.body)
    assert json_calls.decode_form(answer.body) == [("image", b"\x00\r\n--limi"), ("n", b"3")]


@pytest.mark.parametrize(
    ("settings", "body", "kind", "limit"),
    [
        ({"max_json_bytes": 10}, b"x" * 11, "", "max_json_bytes"),
        ({"max_tensor_bytes": 10}, *form(("a", b"")), "max_tensor_bytes"),
        ({"max_heap_bytes": 1_000_000}, *form(("a", b"x" * 2_000_000)), "max_heap_bytes"),
        ({"max_request_bytes": 10}, b"x" * 11, "", "max_request_bytes"),
    ],
)
def test_bodies_that_are_too_large(settings: Any, body: bytes, kind: str, limit: str) -> None:
    client = make_client(**settings)
    answer = client.ask("POST", "/models/echo", body, CONTENT_TYPE=kind)
    assert limit in error_of(answer, answer.status)
    assert answer.status in (400, 413)


def test_models_of_tensors_are_told_apart(client: Client) -> None:
    answer = client.ask("POST", "/models/identity", b"{}")
    text = error_of(answer, 404)
    assert text.startswith(
        "model 'identity' takes tensors: its paths are /v2/models/identity/infer"
    )
    assert text.endswith("for an object of plain JSON, /v2/models/identity/generate")
    assert client.ask("POST", "/models/nobody", b"{}").status == 404
    assert client.ask("GET", "/models/echo").status == 405


def test_answers_of_bytes_have_their_content_type(client: Client) -> None:
    answer = client.ask("POST", "/models/picture", b"\x89PNG")
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
    assert answer.body == b"\x89PNG"
    assert client.ask("POST", "/models/echo", b"1").headers["content-type"] == "application/json"
    operation = client.get("/openapi.json").json["paths"]["/models/picture"]["post"]
    assert list(operation["responses"]["200"]["content"]) == ["image/png"]


def test_streams(client: Client) -> None:
    answer = client.ask("POST", "/models/stream", b"{}")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    answer = client.ask("POST", "/models/stream", b"fail")
    assert answer.body.endswith(b'data: 1\n\ndata: {"error":"no third"}\n\n')

    def refuse(_: FakeRequest) -> Iterator[Outcome]:
        yield Outcome(error=InvalidArgument("Expected `int`"))

    client.dispatcher.functions["stream"] = refuse
    assert error_of(client.ask("POST", "/models/stream", b"{}"), 400) == "Expected `int`"


def test_errors_of_the_model(client: Client) -> None:
    def fail(_: FakeRequest) -> Outcome:
        raise InvalidArgument("Expected `int`, got `str` - at `$.n`")

    client.dispatcher.functions["echo"] = fail
    answer = client.ask("POST", "/models/echo", b"{}")
    assert error_of(answer, 400) == "Expected `int`, got `str` - at `$.n`"


def test_the_category_is_inference() -> None:
    client = make_client(http_restricted_api=("inference:who=me",))
    assert client.ask("POST", "/models/echo", b"{}").status == 403
    assert client.ask("POST", "/models/echo", b"{}", {"who": "me"}).status == 200


def test_the_api_document_follows_the_models(client: Client) -> None:
    document = client.get("/openapi.json").json
    validate(document)  # operation ids are unique
    operation = document["paths"]["/models/echo"]["post"]
    assert (operation["summary"], operation["x-action"]) == ("Doubles a number", "use")
    assert operation["requestBody"]["content"]["application/json"]["schema"] == SCHEMAS.body
    assert "image" in json.dumps(operation["requestBody"]["content"]["multipart/form-data"])
    assert document["components"]["schemas"]["echo.Body"] == {"type": "object"}
    events = document["paths"]["/models/stream"]["post"]["responses"]["200"]["content"]
    assert events == {"text/event-stream": {}}
    assert document["components"]["schemas"]["Error"] != HOSTILE
    plain = Client().get("/openapi.json").json["paths"]
    assert "/models/{name}" in plain
    assert "/models/echo" not in plain


# -------------------------------------------------------------------- forms

NAMES = st.text("abcxyz_09", min_size=1, max_size=20)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=200)), max_size=MAX_PARTS))
def test_forms_are_read_as_they_were_written(parts: list[tuple[str, bytes]]) -> None:
    parts = [(name, content.replace(b"\r\n--limit", b"")) for name, content in parts]
    assert form_parts.form_parts(*form(*parts)) == parts


PIECES = st.sampled_from(
    [
        b"--limit",
        b"--",
        b"\r\n",
        b"\r\n\r\n",
        b": ",
        b"\xff",
        b'Content-Disposition: form-data; name="a"',
    ]
)


@given(st.lists(PIECES | st.binary(max_size=8), max_size=30).map(b"".join))
@example(form(("a", b""))[0] + b"more")
@example(form(("a", b""))[0][:-6])
def test_other_bytes_are_refused_or_bounded(body: bytes) -> None:
    try:
        parts = form_parts.form_parts(body, "multipart/form-data; boundary=limit")
    except InvalidArgument:
        return
    assert len(parts) <= MAX_PARTS
    assert sum(len(content) for _, content in parts) <= len(body)
    assert all(0 < len(name) <= form_parts.MAX_NAME for name, _ in parts)


BEGIN = b"--limit\r\n"
END = b"\r\n--limit--\r\n"
NAMED = b'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (form(*[("a", b"")] * (MAX_PARTS + 1))[0], "boundary=limit", "maximum number"),
        (BEGIN + NAMED + b"\r\nX: " + b"x" * 5000 + b"\r\n\r\n" + END, "boundary=limit", "headers"),
        (BEGIN + NAMED + b"\r\n\r\nabc", "boundary=limit", "structure"),
        (b"", "boundary=limit", "structure"),
        (BEGIN + b"A: b\r\n\r\n" + END, "boundary=limit", "part 1 of the form has no name"),
        (form(("a" * 300, b""))[0], "boundary=limit", "part 1 of the form has no name"),
        (BEGIN + NAMED[:-2] + b'\xff"\r\n\r\n' + END, "boundary=limit", "not valid text"),
        (form()[0], "", "[Bb]oundary"),
        (form()[0], "boundary=" + "x" * 71, "[Bb]oundary"),
        (
            BEGIN + NAMED + b"\r\nContent-Transfer-Encoding: base64\r\n\r\n" + END,
            "boundary=limit",
            "Content-Transfer-Encoding",
        ),
    ],
)
def test_forms_that_are_refused(body: bytes, kind: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        form_parts.form_parts(body, f"multipart/form-data; {kind}")
