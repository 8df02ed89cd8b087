"""Input from HTTP clients: heads and bodies of a connection, JSON, tensors behind the JSON."""

from __future__ import annotations

import gzip
import io
import json
import socket
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from gunicorn.config import Config

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.routes.application import create_app
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.worker_context import Hooks, ServingContext
from shmserve.frontends.oip.generate import parse_generate
from shmserve.protocol.oip import tensor_json
from shmserve.protocol.oip.model_signature import make_signature
from shmserve.protocol.oip.request import parse_request
from shmserve.tensor.dtypes import DATATYPES
from shmserve.testing import fake_models
from shmserve.testing.fake_dispatch import FakeDispatcher

LIMITS = Settings(max_request_bytes=1 << 20, max_head_bytes=4096)
# The model `failing` fails on purpose, which is no fault of a parser.
_DISPATCHER = FakeDispatcher([row for row in fake_models.models() if row[0].name != "failing"])


def _defect(_: ErrorHandlers, req: Any, resp: Any, ex: Exception, params: Any) -> None:
    """Raise errors that the application would answer with "internal server error": they are
    findings."""
    raise ex


with mock.patch.object(ErrorHandlers, "on_unexpected", _defect):
    _APP = create_app(_DISPATCHER, LIMITS)  # type: ignore[arg-type]
_TOLD = (501, 503, 505)  # answers from 500 on that a client can cause
_SPECS = {spec.name: spec for spec, _ in fake_models.models()}
_GENERATED = [make_signature(_SPECS[name]) for name in ("identity", "identity_bytes", "batched")]
VALUES = np.array([1, 2, 3, 4.5], np.float32)


_LOOK, _WHOLE = int(socket.MSG_PEEK), int(socket.MSG_WAITALL)


class FakeLog:
    """Log that raises errors which a connection could only log: they are findings, too."""

    def exception(self, text: str, *args: object) -> None:
        raise

    def info(self, *_: object) -> None: ...


class FakeSocket:
    """Socket of a client that has sent `data` and closed; receives at most `step` bytes at a
    time."""

    family = socket.AF_INET

    def __init__(self, data: bytes, step: int) -> None:
        self._data = memoryview(data)
        self._step = step
        self.said = bytearray()

    def recv(self, count: int, flags: int = 0) -> bytes:
        whole = flags & _WHOLE
        found = bytes(self._data[: count if whole else min(count, self._step)])
        if not flags & _LOOK:
            self._data = self._data[len(found) :]
        return found

    def recv_into(self, view: Any, count: int = 0, flags: int = 0) -> int:
        found = self.recv(count or len(view), flags | _WHOLE)
        view[: len(found)] = found
        return len(found)

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.1", 5

    def sendmsg(self, buffers: Any) -> int:
        data = b"".join(buffers)
        self.said += data
        return len(data)

    def sendall(self, data: bytes) -> None:
        self.said += data

    def shutdown(self, how: int) -> None: ...


def _serving() -> ServingContext:
    hooks = Hooks(retire=lambda: None)
    return ServingContext(Config(), FakeLog(), LIMITS, _APP, hooks, 1 << 62)


_SERVING = _serving()


def connection(data: bytes) -> None:
    """A whole connection. The first byte sets the size of the pieces of the rest."""
    sock: Any = FakeSocket(data[1:], 1 + 40 * data[0] if data else 1)
    served = HttpConnection(_SERVING, lambda _: sock, ("192.0.2.1", 5), ("192.0.2.2", 80))
    served._caller = Caller()
    served.serve()
    _check_calls()
    assert not sock.said or sock.said.startswith(b"HTTP/1.1 "), bytes(sock.said[:100])
    for line in sock.said.split(b"HTTP/1.1 ")[1:]:
        if line[:3].isdigit() and line[3:4] == b" ":
            assert int(line[:3]) < 500 or int(line[:3]) in _TOLD, line[:200]


def _check_calls() -> None:
    calls, _DISPATCHER.calls = _DISPATCHER.calls, []
    assert all(call.closed == 1 for call in calls), "a call was not closed once"


def _http(head: str, body: bytes = b"", step: int = 255) -> bytes:
    return bytes([step]) + head.replace("\n", "\r\n").encode() + b"\r\n" + body


def infer_json(data: Any = None, **more: Any) -> bytes:
    tensor = {"name": "INPUT0", "shape": [4], "datatype": "FP32"}
    tensor |= {"data": [1, 2, 3, 4.5]} if data is None else data
    return json.dumps({"inputs": [tensor], **more}).encode()


BINARY = infer_json(
    {"parameters": {"binary_data_size": 16}}, parameters={"binary_data_output": True}
)


def connection_seeds() -> list[bytes]:
    host = "Host: localhost\n"
    ready = f"GET /v2/health/ready HTTP/1.1\n{host}"
    infer = f"POST /v2/models/identity/infer HTTP/1.1\n{host}"
    length = len(BINARY)
    whole = f"{infer}Content-Length: {length + 16}\nInference-Header-Content-Length: {length}\n"
    text = infer_json()
    chunks = b"5\r\n%b\r\n%x;x=y\r\n%b\r\n0\r\nX: y\r\n\r\n" % (text[:5], len(text) - 5, text[5:])
    packed = gzip.compress(text, mtime=0)
    other = [
        ("load", {"parameters": {"config": "{}"}}, "repository/models/identity/load"),
        ("trace", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, "trace/setting"),
        ("log", {"log_verbose_level": 1, "log_info": True}, "logging"),
        ("region", {"key": "/a", "byte_size": 64}, "systemsharedmemory/region/a/register"),
        ("index", {"ready": True}, "repository/index"),
        ("generate", {"INPUT0": [1, 2], "id": "7"}, "models/identity/generate"),
    ]
    posts = []
    for _, document, path in other:
        body = json.dumps(document).encode()
        posts.append(_http(f"POST /v2/{path} HTTP/1.1\n{host}Content-Length: {len(body)}\n", body))
    return [
        _http(ready),
        _http(ready) + _http(ready + "Connection: close\n")[1:],
        _http(f"GET /v2/models/identity/stats HTTP/1.0\n{host}", step=0),
        _http(whole, BINARY + VALUES.tobytes(), 1),
        _http(whole + "Expect: 100-continue\n", BINARY + VALUES.tobytes()),
        _http(f"{infer}Transfer-Encoding: chunked\n", chunks, 0),
        _http(f"{infer}Content-Encoding: gzip\nContent-Length: {len(packed)}\n", packed),
        *posts,
    ]


_MODELS = sorted(_SPECS.keys() - {"failing"})
_CODINGS = ("", "gzip", "deflate", "identity")


def inference_environ(model: str, body: bytes) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": f"/v2/models/{model}/infer",
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "CONTENT_LENGTH": str(len(body)),
    }


def inference(data: bytes) -> None:
    """A body through the whole application, after bytes for model, coding, and size of the JSON
    part."""
    choice, length, body = data[:1] or b"\0", int.from_bytes(data[1:3], "big"), data[3:]
    model, coding = _MODELS[choice[0] % len(_MODELS)], _CODINGS[choice[0] >> 6]
    environ = inference_environ(model, body)
    if length:
        environ["HTTP_INFERENCE_HEADER_CONTENT_LENGTH"] = str(length)
    if coding:
        environ["HTTP_CONTENT_ENCODING"] = coding
    started: list[int] = []

    def start(status: str, *_: object) -> Any:
        started.append(int(status[:3]))

    result: Any = _APP(environ, start)
    answer = b"".join(result)
    if hasattr(result, "close"):
        result.close()
    _check_calls()
    assert started[0] < 500 or started[0] in _TOLD, answer
    if started[0] != 200:
        assert json.loads(answer)["error"]


def inference_seeds() -> list[bytes]:
    def framed(model: str, document: bytes, tail: bytes = b"", coding: int = 0) -> bytes:
        choice = _MODELS.index(model)
        while choice >> 6 != coding:  # the same model, with this coding
            choice += len(_MODELS)
        body = document + tail
        if coding == 1:
            body = gzip.compress(body, mtime=0)
        return bytes([choice]) + len(document if tail else b"").to_bytes(2, "big") + body

    texts = {"datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}}
    batch = {"shape": [2, 4], "data": [[1, 2, 3, 4], [5, 6, 7, 8]]}
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    return [
        framed("identity", infer_json()),
        framed("identity", BINARY, VALUES.tobytes()),
        framed("identity", infer_json(), coding=1),
        framed("identity", infer_json({"parameters": region})),
        framed("identity_bytes", infer_json(texts), b"\3\0\0\0abc\0\0\0\0"),
        framed("batched", infer_json(batch, outputs=outputs, id="x")),
    ]


def oip_json(data: bytes) -> None:
    """The JSON part of a request; names must be equal to the names that Python's own reader sees.

    Ignored parts, such as unknown members, need not be UTF-8.
    """
    try:
        request = parse_request(data, LIMITS)
    except InvalidArgument:
        return
    names = [tensor["name"] for tensor in json.loads(data.decode(errors="replace"))["inputs"]]
    assert [tensor.name for tensor in request.inputs] == names
    for given in request.inputs:
        known = DATATYPES.get(given.datatype)
        if given.data is None or known is None or not known.json_ok:
            continue
        try:
            count = min(int(np.prod(given.shape, dtype=object)), 1 << 20)
            tensor = tensor_json.decode(given.data, known, count, given.where)
            buffer = bytearray(tensor.nbytes)
            tensor.write(memoryview(buffer))
        except InvalidArgument:
            continue


def oip_json_seeds() -> list[bytes]:
    kinds = [name for name, kind in DATATYPES.items() if kind.json_ok]
    tensors = [
        {"name": f"I{n}", "shape": [2], "datatype": kind, "data": data, "parameters": {"a": 1}}
        for n, kind in enumerate(kinds)
        for data in [["a", "é"] if kind == "BYTES" else [0, 1]]
    ]
    outputs = [{"name": "O", "parameters": {"binary_data": True, "classification": 3}}]
    parameters = {"sequence_id": 3, "priority": 1, "x": 0.5, "binary_data_output": False}
    return [
        infer_json(),
        BINARY,
        json.dumps({"inputs": tensors, "id": "i"}).encode(),
        infer_json({"data": [[1, 2], [3, 4]]}, outputs=outputs, parameters=parameters),
    ]


def generate(data: bytes) -> None:
    """A request of the generate extension, for models of several signatures."""
    for signature in _GENERATED:
        try:
            parse_generate(signature, data)
        except InvalidArgument:
            continue


def generate_seeds() -> list[bytes]:
    documents = ({"INPUT0": [1.5, 2]}, {"INPUT0": "text", "id": "7"}, {"INPUT0": [[1, 2, 3, 4]]})
    return [msgspec.json.encode({**document, "temperature": 0.5}) for document in documents]
