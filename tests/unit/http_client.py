"""The HTTP application over the fake dispatcher, called as a WSGI server calls it."""

import io
import json
from typing import Any

import numpy as np

from shmserve.config import Settings
from shmserve.frontends.http.routes.application import worker_application
from shmserve.frontends.http.server.response import BufferBody
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher, FakeRequest

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
        if self.body and not self.headers["content-type"].startswith("text/event-stream"):
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
        self.app: Any = worker_application(self.dispatcher, settings or Settings())  # type: ignore[arg-type]

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

        def start(status: str, fields: list[tuple[str, str]], *_: object) -> Any:
            started.extend((status, fields))

        result = self.app(env, start)
        answer = Answer(started[0], started[1], result)
        for call in self.dispatcher.calls:
            assert call.closed, "a call was not closed"
        return answer

    def fail(self, error: Exception) -> None:
        """Have the model `identity` fail."""

        def model(_: FakeRequest) -> Any:
            raise error

        self.dispatcher.functions["identity"] = model

    def get(self, path: str, **kwargs: Any) -> Answer:
        return self.ask("GET", path, **kwargs)

    def infer(self, document: Any, path: str = INFER, tail: bytes = b"", **kwargs: Any) -> Answer:
        head = document if isinstance(document, bytes) else json.dumps(document).encode()
        headers = dict(kwargs.pop("headers", {}))
        if tail:
            headers["Inference-Header-Content-Length"] = str(len(head))
        return self.ask("POST", path, head + tail, headers, **kwargs)

    @property
    def request(self) -> FakeRequest:
        """The request of the last call."""
        request = self.dispatcher.calls[-1].request
        assert request is not None
        return request

    @property
    def receipt(self) -> Any:
        return self.dispatcher.calls[-1].receipt


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
