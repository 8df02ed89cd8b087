"""The HTTP application over the fake dispatcher, called as a WSGI server calls it."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.errors import QueueFull
from shmserve.frontends.http.app import create_app
from shmserve.frontends.http.buffers import BufferBody
from shmserve.tensor import bytes_codec
from shmserve.testing import fake_models
from shmserve.testing.fake_dispatch import FakeDispatcher, FakeOutcome, FakeRequest

INFER = "/v2/models/identity/infer"
VALUES = np.array([1, 2, 3, 4.5], np.float32).tobytes()


class Body(io.BytesIO):
    """A ``wsgi.input`` like our worker class's: `readinto` fills the view."""

    def __init__(self, data: bytes, copied: int = 0) -> None:
        super().__init__(data)
        self.copied = 0
        self._with_head = copied

    def readinto(self, view: Any) -> int:
        self.copied += self._with_head
        return super().readinto(view)


class PlainBody:
    """A ``wsgi.input`` that can only `read`."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)


class Answer:
    def __init__(self, status: str, headers: list[tuple[str, str]], body: Any) -> None:
        self.status = int(status[:3])
        self.headers = {name.lower(): value for name, value in headers}
        assert len(self.headers) == len(headers), "a field was sent twice"
        self.streamed = isinstance(body, BufferBody)
        self.body = b"".join(body)
        if hasattr(body, "close"):
            body.close()
        if self.body:
            assert int(self.headers["content-length"]) == len(self.body)

    @property
    def json(self) -> Any:
        head = self.headers.get("inference-header-content-length")
        return json.loads(self.body[: int(head)] if head else self.body)

    @property
    def tail(self) -> bytes:
        return self.body[int(self.headers["inference-header-content-length"]) :]


class Client:
    def __init__(self, settings: Settings | None = None) -> None:
        self.dispatcher: FakeDispatcher = fake_models.dispatcher()
        self.app = create_app(self.dispatcher, settings or Settings())

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        stream: Any = None,
        **environ: Any,
    ) -> Answer:
        env: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": "",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "http",
            "wsgi.input": stream if stream is not None else Body(body),
            "wsgi.errors": io.StringIO(),
            "CONTENT_LENGTH": str(len(body)),
        }
        for name, value in (headers or {}).items():
            env["HTTP_" + name.upper().replace("-", "_")] = value
        env |= environ
        for key in [key for key, value in env.items() if value is None]:
            del env[key]
        started: list[Any] = []
        result = self.app(env, lambda status, fields, _=None: started.extend((status, fields)))
        answer = Answer(started[0], started[1], result)
        for call in self.dispatcher.calls:
            assert call.closed, "a call was not closed"
        return answer

    def get(self, path: str, **kwargs: Any) -> Answer:
        return self.ask("GET", path, **kwargs)

    def infer(self, document: Any, path: str = INFER, tail: bytes = b"", **kwargs: Any) -> Answer:
        head = document if isinstance(document, bytes) else json.dumps(document).encode()
        headers = dict(kwargs.pop("headers", {}))
        if tail:
            headers["Inference-Header-Content-Length"] = str(len(head))
        return self.ask("POST", path, head + tail, headers, **kwargs)

    @property
    def receipt(self) -> Any:
        return self.dispatcher.calls[-1].receipt


@pytest.fixture
def client() -> Client:
    return Client()


def as_json(data: list[Any], shape: list[int] | None = None, datatype: str = "FP32") -> Any:
    return {"name": "INPUT0", "shape": shape or [len(data)], "datatype": datatype, "data": data}


def as_binary(size: int, shape: list[int], datatype: str = "FP32") -> Any:
    parameters = {"binary_data_size": size}
    return {"name": "INPUT0", "shape": shape, "datatype": datatype, "parameters": parameters}


BINARY_OUT = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
BINARY = {"inputs": [as_binary(16, [4])], "outputs": BINARY_OUT}


def error_of(answer: Answer, status: int) -> str:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json) == ["error"]
    text = answer.json["error"]
    assert isinstance(text, str)
    assert text
    return text


# ------------------------------------------------------------------ metadata, health, paths


def test_server_metadata(client: Client) -> None:
    answer = client.get("/v2")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["name"] == "shmserve"
    assert "binary_tensor_data" in answer.json["extensions"]
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
    error_of(client.get("/v2/health/ready"), 503)
    client.dispatcher.published = False
    error_of(client.get("/v2/health/ready"), 503)
    assert client.get("/v2/health/live").status == 200


def test_a_model_that_is_not_ready(client: Client) -> None:
    client.dispatcher.put(fake_models.spec("identity", "FP32", (-1,)), ModelState.LOADING)
    error_of(client.get("/v2/models/identity/ready"), 503)
    assert "not at ready state" in error_of(client.infer({"inputs": []}), 503)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v2/",
        "/v2/health",
        "/v2/nosuch",
        "/v2/models",
        "/v2/models/",
        "/v2/models/identity/",
        "/v2/models/nosuch",
        "/v2/models/nosuch/config",
        "/v2/models/nosuch/ready",
        "/v2/models/identity/versions/7/ready",
        "/v2/models/identity/versions/x",
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


# ------------------------------------------------------------------------------- inference


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
    outputs[0]["parameters"]["binary_data"] = True
    answer = client.infer({"inputs": [as_json([1, 2, 3, 4.5])], "outputs": outputs})
    assert answer.tail == bytes_codec.encode(["4.500000:3", "3.000000:2"])
    outputs[0]["parameters"] = {"classification": 0}
    answer = client.infer({"inputs": [as_json([1, 2])], "outputs": outputs})
    assert answer.json["outputs"][0]["data"] == [1, 2]


def test_a_model_may_give_no_outputs(client: Client) -> None:
    answer = client.infer({"inputs": [as_json([3])]}, "/v2/models/failing/infer")
    assert answer.json["outputs"] == []


def test_parameters_of_the_answer(client: Client) -> None:
    client.dispatcher.functions["identity"] = lambda request: FakeOutcome((), {"a": 1})
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

    seen: list[Any] = []
    call = FakeDispatcher.call

    def spy(entry: Any) -> Any:
        made = call(client.dispatcher, entry)
        run = made.execute
        made.execute = lambda *args: (seen.append(args[3]), run(*args))[1]
        return made

    client.dispatcher.call = spy
    client.infer(BINARY, tail=VALUES, **{"shmserve.connection": Connection()})
    client.infer(BINARY, tail=VALUES)
    assert seen[0]() is True
    assert seen[1] is None


# ------------------------------------------------------------------------ lengths and bodies


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("", "Unable to parse Inference-Header-Content-Length"),
        ("x", "Unable to parse"),
        ("0x10", "Unable to parse"),
        ("1.0", "Unable to parse"),
        ("106,3", "Unable to parse"),
        ("\u0663", "Unable to parse"),
        ("-1", r"should be in range \(0, "),
        ("100000", r"should be in range \(0, "),
        ("9" * 30, r"should be in range \(0, "),
        ("5", "failed to parse the request JSON"),
    ],
)
def test_header_lengths_that_make_no_sense(client: Client, length: str, message: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    body = json.dumps(BINARY).encode() + VALUES
    answer = client.ask("POST", INFER, body, headers)
    assert re.search(message, error_of(answer, 400))


@pytest.mark.parametrize(
    ("document", "tail", "message"),
    [
        (BINARY, VALUES[:12], "expecting 4 additional bytes for model 'identity'"),
        (BINARY, VALUES + b"xxxx", "unexpected additional input data for model 'identity'"),
        ({"inputs": [as_json([1])]}, b"x", "unexpected additional input data"),
        ({"inputs": [as_binary(16, [8])]}, VALUES, "Expected 32, got 16"),
    ],
)
def test_sizes_that_disagree(client: Client, document: Any, tail: bytes, message: str) -> None:
    assert message in error_of(client.infer(document, tail=tail), 400)
    assert not client.dispatcher.calls, "nothing is reserved for a request that does not fit"


def test_bodies_that_are_not_there(client: Client) -> None:
    error_of(client.ask("POST", INFER), 400)
    assert "no body" in error_of(client.ask("POST", INFER, CONTENT_LENGTH=None), 400)
    error_of(client.ask("POST", INFER, CONTENT_LENGTH="-1"), 400)
    error_of(client.ask("POST", INFER, CONTENT_LENGTH="1e3"), 400)
    small = Client(Settings(max_request_bytes=100))
    assert "max_request_bytes" in error_of(small.infer(BINARY, tail=VALUES), 413)
    small = Client(Settings(max_json_bytes=100))
    assert "max_json_bytes" in error_of(small.infer(BINARY, tail=VALUES), 413)
    assert "max_json_bytes" in error_of(small.infer(BINARY), 413)


def test_a_client_that_stops_halfway_frees_the_slots(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    for stream in (Body(head + VALUES[:5]), PlainBody(head + VALUES[:5])):
        answer = client.infer(BINARY, tail=VALUES, stream=stream)
        assert "ended early" in error_of(answer, 400)
        call = client.dispatcher.calls[-1]
        assert (call.closed, call.request) == (1, None)


def test_chunked_bodies(client: Client) -> None:
    head = json.dumps(BINARY).encode()
    chunked = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = client.infer(BINARY, tail=VALUES, stream=PlainBody(head + VALUES), **chunked)
    assert answer.tail == VALUES
    document = {"inputs": [as_json([1, 2])]}
    stream = PlainBody(json.dumps(document).encode())
    assert client.infer(document, stream=stream, **chunked).status == 200
    for tail in (VALUES[:9], VALUES + b"x"):
        answer = client.infer(BINARY, tail=VALUES, stream=PlainBody(head + tail), **chunked)
        error_of(answer, 400)
    error_of(client.infer(BINARY, stream=PlainBody(b""), **chunked), 400)


def test_bytes_inputs_are_checked(client: Client) -> None:
    document = {"inputs": [as_binary(7, [2], "BYTES")]}
    answer = client.infer(document, "/v2/models/identity_bytes/infer", b"\x01\0\0\0a\x01\0")
    assert "incomplete string length indicator" in error_of(answer, 400)


# --------------------------------------------------------------------------------- encodings


def test_compressed_requests(client: Client) -> None:
    document = {"inputs": [as_json([1, 2, 3, 4.5])]}
    text = json.dumps(document).encode()
    bare = zlib.compressobj(wbits=-15)
    bodies = [
        ("gzip", gzip.compress(text)),
        ("GZIP", gzip.compress(text)),
        ("x-gzip", gzip.compress(text)),
        ("deflate", zlib.compress(text)),
        ("deflate", bare.compress(text) + bare.flush()),
        ("identity", text),
    ]
    for name, body in bodies:
        answer = client.infer(body, headers={"Content-Encoding": name})
        assert answer.json["outputs"][0]["data"] == [1, 2, 3, 4.5], name
    head = json.dumps(BINARY).encode()
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(head))}
    answer = client.ask("POST", INFER, gzip.compress(head + VALUES), headers)
    assert answer.tail == VALUES


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("gzip", b'{"inputs": []}', 400),
        ("gzip", gzip.compress(b"{}" * 100)[:-9], 400),
        ("gzip", gzip.compress(b"{}") + b"more", 400),
        ("gzip", b"", 400),
        ("deflate", b"\x78\x9cgarbage", 400),
        ("deflate", b"garbage", 400),
        ("br", b"x", 415),
        ("deflate, gzip", b"x", 415),
    ],
)
def test_bad_encodings(client: Client, name: str, body: bytes, status: int) -> None:
    answer = client.ask("POST", INFER, body, {"Content-Encoding": name})
    error_of(answer, status)
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_decompression_bombs_meet_the_limits() -> None:
    client = Client(Settings(max_json_bytes=10_000, max_request_bytes=1_000_000))
    bomb = gzip.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "gzip"}
    assert "max_json_bytes" in error_of(client.ask("POST", INFER, bomb, headers), 413)
    headers["Inference-Header-Content-Length"] = "0"
    error_of(client.ask("POST", INFER, bomb, headers), 413)
    head = json.dumps(BINARY).encode()
    headers["Inference-Header-Content-Length"] = str(len(head))
    body = gzip.compress(head + VALUES + b"\0" * 50_000_000)
    assert "additional input data" in error_of(client.ask("POST", INFER, body, headers), 400)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("x-gzip", "gzip"),
        ("gzip;q=0.1, deflate;q=0.9", "deflate"),
        ("gzip, identity;q=0", "gzip"),
        ("deflate, gzip, identity;q=0", "deflate"),
        ("gzip, deflate, br", None),
        ("deflate, gzip", None),
        ("identity, gzip;q=0.5", None),
        ("gzip;q=0", None),
        ("gzip;q=x", None),
        ("gzip;q=nan", None),
        ("br", None),
        ("*", None),
        ("", None),
    ],
)
def test_accept_encoding(client: Client, accept: str, chosen: str | None) -> None:
    headers = {"Accept-Encoding": accept}
    answer = client.infer(BINARY, tail=VALUES, headers=headers)
    assert answer.status == 200
    assert answer.headers.get("content-encoding") == chosen
    if chosen:
        answer.body = zlib.decompress(answer.body, 47)
    assert answer.tail == VALUES
    assert "content-encoding" not in client.infer(b"{", headers=headers).headers
    assert "content-encoding" not in client.get("/v2", headers=headers).headers


# ------------------------------------------------------------------------------------ errors


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


def test_unexpected_errors_show_nothing(client: Client, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        answer = client.infer({"inputs": [as_json([5])]}, "/v2/models/failing/infer")
    assert error_of(answer, 500) == "internal server error"
    assert "a secret of" in caplog.text


def test_a_full_server_says_when_to_come_back(client: Client) -> None:
    client.dispatcher.budget = 10
    answer = client.infer(BINARY, tail=VALUES)
    error_of(answer, 503)
    assert answer.headers["retry-after"] == "1"
    client.dispatcher.budget = None

    def full(request: FakeRequest) -> FakeOutcome:
        raise QueueFull("the queue is full")

    client.dispatcher.functions["identity"] = full
    assert client.infer(BINARY, tail=VALUES).headers["retry-after"] == "1"


def test_regions_are_recognised_and_not_found(client: Client) -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    source = {"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": parameters}
    assert "'r'" in error_of(client.infer({"inputs": [source]}), 404)
    outputs = [{"name": "OUTPUT0", "parameters": parameters}]
    error_of(client.infer({"inputs": [as_json([1])], "outputs": outputs}), 404)
    outputs = [{"name": "OUTPUT0", "parameters": {**parameters, "classification": 1}}]
    error_of(client.infer({"inputs": [as_json([1])], "outputs": outputs}), 400)


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
