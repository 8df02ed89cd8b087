"""Custom HTTP requests as models see them."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.grps.executor.flask_request import HttpRequest
from shmserve.grps.protocol.custom_http import RequestHead


def request(body: bytes = b"", content_type: str = "application/json; charset=utf-8") -> Any:
    head = RequestHead(
        "POST",
        "/chat",
        (("a", "1"), ("a", "2"), ("b", "x y")),
        (("Content-Type", content_type), ("X-One", "1"), ("x-one", "2")),
        "10.0.0.7",
    )
    return HttpRequest(head, body)


def test_what_code_written_for_flask_looks_at() -> None:
    seen = request(b'{"k": [1]}')
    assert (seen.method, seen.path, seen.remote_addr) == ("POST", "/chat", "10.0.0.7")
    assert (seen.args["a"], seen.args.get("a", type=int)) == ("1", 1)
    assert seen.args.getlist("a") == ["1", "2"]
    assert seen.args.get("none") is None
    assert seen.args.get("b", 7, int) == 7
    assert seen.args.to_dict() == {"a": "1", "b": "x y"}
    assert (seen.headers["x-ONE"], "X-oNe" in seen.headers) == ("1", True)
    assert seen.headers.getlist("X-One") == ["1", "2"]
    assert seen.content_type == "application/json; charset=utf-8"
    assert seen.mimetype == "application/json"
    assert seen.is_json
    assert seen.json == seen.get_json() == {"k": [1]}
    assert seen.data == seen.get_data() == seen.stream.read() == b'{"k": [1]}'
    assert seen.get_data(as_text=True) == '{"k": [1]}'
    assert seen.content_length == 10
    assert seen.query_string == b"a=1&a=2&b=x+y"
    assert seen.full_path == "/chat?a=1&a=2&b=x+y"
    form = request(b"x=1&y=", "application/x-www-form-urlencoded").form
    assert form.to_dict() == {"x": "1", "y": ""}


def test_json_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="not application/json"):
        request(b"{}", "text/plain").get_json()
    assert request(b"{}", "text/plain").get_json(silent=True) is None
    assert request(b"{}", "text/plain").get_json(force=True) == {}
    with pytest.raises(InvalidArgument, match="is not JSON"):
        request(b"{").get_json()
    assert request(b"{").get_json(silent=True) is None
