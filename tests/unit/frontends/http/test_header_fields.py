"""Header fields with a `_` in the name, from the socket to the model and to access control."""

from typing import Any

import pytest
from gunicorn.config import Config

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.errors import InvalidArgument
from shmserve.frontends.deciding_fields import refuse_alike
from shmserve.frontends.http.routes.application import create_app
from shmserve.frontends.http.server.header_fields import HeaderFields, header_fields, underscored
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.worker_context import Hooks, ServingContext
from shmserve.frontends.oip.forwarded_fields import compiled, forwarded
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher
from tests.fuzz.http_targets import FakeLog, FakeSocket, infer_json
from tests.unit.frontends.key_files import KEY, one_key

GET_MODEL = "GET /v2/models/identity HTTP/1.1\r\n"


class Connections:
    """Whole connections to the application, through our parser of heads."""

    def __init__(self, **settings: Any) -> None:
        self.dispatcher: FakeDispatcher = fake_models.dispatcher()
        own = Settings(**settings)
        app = create_app(self.dispatcher, own)  # type: ignore[arg-type]
        hooks = Hooks(retire=lambda: None)
        self._serving = ServingContext(Config(), FakeLog(), own, app, hooks, 1 << 62)

    def ask(self, first: str, headers: tuple[str, ...], body: bytes = b"") -> tuple[int, str]:
        """Return the status and the whole answer of one request."""
        lines = ("Host: localhost", "Connection: close", f"Content-Length: {len(body)}", *headers)
        head = first + "".join(f"{line}\r\n" for line in lines) + "\r\n"
        sock: Any = FakeSocket(head.encode() + body, 8192)
        served = HttpConnection(self._serving, lambda _: sock, ("127.0.0.1", 5), ("127.0.0.1", 80))
        served._caller = Caller()
        served.serve()
        said = bytes(sock.said).decode()
        return int(said.split(" ", 2)[1]), said

    def infer(self, *headers: str, path: str = "infer") -> tuple[int, str]:
        body = infer_json() if path == "infer" else b'{"INPUT0": [1, 2]}'
        return self.ask(f"POST /v2/models/identity/{path} HTTP/1.1\r\n", headers, body)

    @property
    def parameters(self) -> dict[str, Any]:
        return self.dispatcher.calls[-1].request.parameters


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_names_with_underscores_are_forwarded_as_they_are(path: str) -> None:
    connections = Connections(http_header_forward_pattern="my.header")
    status, said = connections.infer(
        "my_header_1: one", "My_Header_2: two", "my-header-1: other", "other_1: no", path=path
    )
    assert status == 200, said
    expected = {"my_header_1": "one", "my_header_2": "two", "my-header-1": "other"}
    assert connections.parameters == expected


@pytest.mark.parametrize(
    "name", ["sequence_id", "sequence-id", "SEQUENCE_ID", "triton_x", "headers"]
)
def test_reserved_names_are_refused_however_they_are_written(name: str) -> None:
    status, said = Connections(http_header_forward_pattern=".*").infer(f"{name}: 1")
    assert status == 400
    assert f"header '{name.lower()}' cannot be forwarded" in said
    assert "reserved for Triton usage" in said


def test_no_name_with_an_underscore_is_taken_for_another_field() -> None:
    connections = Connections(http_header_forward_pattern="^x.user$")
    body = infer_json()
    status, said = connections.infer("Inference_Header_Content_Length: 3", "Content_Encoding: x")
    assert status == 200, said
    first = "POST /v2/models/identity/infer HTTP/1.1\r\n"
    assert connections.ask(first, ("Transfer_Encoding: chunked", "x_user: a"), body)[0] == 200
    assert connections.parameters == {"x_user": "a"}


def test_what_comes_twice_is_joined() -> None:
    connections = Connections(http_header_forward_pattern="^x")
    assert connections.infer("x_a: 1", "x-a: 3", "x_a: 2")[0] == 200
    assert connections.parameters == {"x_a": "1,2", "x-a": "3"}


def test_a_secret_is_looked_for_under_the_name_it_was_sent_with() -> None:
    connections = Connections(http_restricted_api=("metadata:my_key=s",))
    assert connections.ask(GET_MODEL, ("My_Key: s",))[0] == 200
    assert connections.ask(GET_MODEL, ("my-key: s",))[0] == 403
    assert connections.ask(GET_MODEL, ("my_key: t",))[0] == 403
    connections = Connections(http_restricted_api=("metadata:my-key=s",))
    assert connections.ask(GET_MODEL, ("my-key: s",))[0] == 200
    assert connections.ask(GET_MODEL, ("my_key: s",))[0] == 403


@pytest.mark.parametrize("rule", ["my-key", "my_key", "MY_KEY"])
def test_two_names_that_differ_in_hyphens_alone_decide_nothing(rule: str) -> None:
    connections = Connections(http_restricted_api=(f"metadata:{rule}=s",))
    status, said = connections.ask(GET_MODEL, ("my-key: s", "my_key: s"))
    assert status == 400
    assert "headers 'my-key' and 'my_key' differ only in - and _" in said
    status, said = connections.ask("GET /v2/health/live HTTP/1.1\r\n", ("my-key: a", "my_key: b"))
    assert status == 200, "nothing is decided by them there"


def test_neither_do_they_where_keys_are(tmp_path) -> None:
    connections = Connections(**one_key(tmp_path))
    assert connections.ask(GET_MODEL, (f"shmserve-key: {KEY}",))[0] == 200
    assert connections.ask(GET_MODEL, (f"shmserve_key: {KEY}",))[0] == 401
    assert connections.ask(GET_MODEL, (f"shmserve-key: {KEY}", "shmserve_key: x"))[0] == 400


def test_fields_by_name() -> None:
    environ = {"HTTP_X_A": "1", "PATH_INFO": "/", "shmserve.underscored": {"x_a": "2"}}
    assert dict(header_fields(environ)) == {"x-a": "1", "x_a": "2"}
    assert underscored({}) == {}
    assert HeaderFields({"HTTP_X_A": "1"}).get("x_a") is None
    assert HeaderFields({"shmserve.underscored": {"x_a": "2"}}).get("x-a") is None


def test_alike_is_what_differs_in_hyphens_alone() -> None:
    refuse_alike("a-b", ["a-b", "a-b", "a-c", "a"])
    with pytest.raises(InvalidArgument, match="'a-b' and 'a_b'"):
        refuse_alike("a-b", ["a-b", "a_b"])
    with pytest.raises(InvalidArgument, match="'a-b_c' and 'a_b-c'"):
        refuse_alike("a_b_c", ["a-b_c", "a_b-c"])


def test_the_case_of_letters_counts_where_the_pattern_says_so() -> None:
    fields = [("my_header", "1")]
    loose, strict = compiled("MY_HEADER.*"), compiled("(?-i)MY_HEADER.*")
    assert forwarded(loose, fields) == {"my_header": "1"}
    assert forwarded(strict, fields) == {}
