"""Models' answers to custom HTTP requests, as seen by models; a project's own test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flask
import pytest

from shmserve.grps.executor.context import GrpsContext
from shmserve.grps.executor.flask_response import ResponseHeaders, answer_of, response_of
from shmserve.grps.protocol.custom_http import HttpAnswer
from tests.unit.grps.test_grps_project import INFERENCE, SERVER, make


@pytest.mark.parametrize(
    ("given", "status", "headers", "body"),
    [
        ("hé", 200, {"Content-Type": "text/plain"}, "hé".encode()),
        (b"\0", 200, {"Content-Type": "application/octet-stream"}, b"\0"),
        (bytearray(b"x"), 200, {"Content-Type": "application/octet-stream"}, b"x"),
        (("x", 404, {}), 404, {"Content-Type": "text/plain"}, b"x"),
        ((b"x", 201, {"content-type": "a/b"}), 201, {"content-type": "a/b"}, b"x"),
        (flask.Response("hi", 418), 418, {"Content-Type": "text/html; charset=utf-8"}, b"hi"),
    ],
)
def test_what_may_be_answered(given: Any, status: int, headers: Any, body: bytes) -> None:
    assert answer_of(response_of(given)) == (HttpAnswer(status, tuple(headers.items())), body)


@pytest.mark.parametrize(
    "given",
    [
        None,
        3,
        ("x", 200),
        ("x", "200", {}),
        ("x", 99, {}),
        ({}, 200, {}),
        ("x", 200, []),
        ("x", 200, {"A": "b\r\nC: d"}),
    ],
)
def test_what_may_not(given: Any) -> None:
    with pytest.raises(ValueError, match="HTTP response"):
        response_of(given)


def test_a_response_of_flask_stays_one_with_all_its_cookies() -> None:
    given = flask.Response("hi")
    given.set_cookie("a", "1")
    given.set_cookie("b", "2")
    context = GrpsContext()
    context.set_http_response(given)
    assert context.get_http_response() is given
    head, body = answer_of(given)
    cookies = [value for name, value in head.headers if name == "Set-Cookie"]
    assert cookies == ["a=1; Path=/", "b=2; Path=/"]
    assert body == b"hi"


# Each change is applied to the project's response and to Flask's: both must show the same result.
CHANGES = {
    "nothing": lambda r: None,
    "set_data": lambda r: r.set_data("später"),
    "data": lambda r: setattr(r, "data", b"\0\1"),
    "status_code": lambda r: setattr(r, "status_code", 404),
    "status": lambda r: setattr(r, "status", "503 Service Unavailable"),
    "a number as status": lambda r: setattr(r, "status", 204),
    "mimetype": lambda r: setattr(r, "mimetype", "text/csv"),
    "another mimetype": lambda r: setattr(r, "mimetype", "application/json"),
    "content_type": lambda r: setattr(r, "content_type", "application/x+json; v=1"),
    "a header": lambda r: r.headers.__setitem__("X-One", 1),
    "headers": lambda r: (r.headers.add("X-One", "1"), r.headers.add("x-one", "2")),
    "set": lambda r: (r.headers.add("A", "1"), r.headers.add("a", "2"), r.headers.set("A", "3")),
    "update": lambda r: r.headers.update({"content-type": "a/b", "B": "2"}),
    "extend": lambda r: r.headers.extend([("B", "2")]),
    "remove": lambda r: (r.headers.setdefault("C", "1"), r.headers.remove("c")),
    "pop": lambda r: (r.headers.add("D", "1"), r.headers.pop("d"), r.headers.pop("e", None)),
    "parts": lambda r: setattr(r, "response", [b'{"k":', b" 1}"]),
    "a cookie": lambda r: r.set_cookie("k", "v", max_age=5, httponly=True, samesite="Lax"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_code_written_for_flask_s_response_sees_the_same(change: Any) -> None:
    given = ('{"c": 3.0}', 200, {"Content-Type": "application/json"})
    ours, theirs = response_of(given), flask.Response(*given)
    for response in (ours, theirs):
        change(response)
    for name in ("status_code", "status", "mimetype", "content_type", "is_json", "response"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.data == ours.get_data() == theirs.get_data()
    assert ours.get_data(as_text=True) == theirs.get_data(as_text=True)
    if theirs.is_json and theirs.data[:1] == b"{":
        assert ours.json == ours.get_json() == theirs.get_json()
    assert _fields(ours.headers) == _fields(theirs.headers)
    assert list(ours.headers) == ours.headers.items()
    for name in ("content-type", "X-ONE", "nosuch"):
        assert (name in ours.headers) == (name in theirs.headers)
        assert ours.headers.get(name) == theirs.headers.get(name)
        assert ours.headers.getlist(name) == theirs.headers.getlist(name)
    assert answer_of(ours)[1] == answer_of(theirs)[1]


def _fields(headers: Any) -> list[tuple[str, list[str]]]:
    """By name; the parts of a cookie have no order, and one that lasts says until when once."""
    parts = [(name.lower(), value.split("; ")) for name, value in headers.items()]
    return sorted((n, sorted(p for p in v if not p.startswith("Expires="))) for n, v in parts)


def test_what_is_no_json_and_what_is_missing() -> None:
    response = response_of(("{", 200, {"Content-Type": "application/json"}))
    assert response.get_json(silent=True) is None
    with pytest.raises(ValueError):
        response.get_json()
    assert response_of("text").json is None
    with pytest.raises(KeyError):
        ResponseHeaders()["nosuch"]
    response.status_code = 1000
    with pytest.raises(ValueError, match="from 100 to 599"):
        answer_of(response)


INFERER = """
import json
from grps_framework.context.context import GrpsContext
from grps_framework.model_infer.inferer import ModelInferer, inferer_register

class Adder(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        return True

    def infer(self, inp, context: GrpsContext):
        return {"c": inp["a"] + inp["b"]}

inferer_register.register("your_inferer", Adder())
"""
CONVERTER = """
import json
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.converter.converter import Converter, converter_register

class Http(Converter):
    def preprocess(self, inp, context):
        return context.get_http_request().get_json()

    def postprocess(self, inp, context):
        context.set_http_response((json.dumps(inp), 200, {"Content-Type": "application/json"}))
        context.get_http_response().headers["X-Made-By"] = "postprocess"
        return GrpsMessage()

converter_register.register("your_converter", Http())
"""
TEST = """
import unittest
import flask
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.test import GrpsTest
from src.customized_converter import converter_register
from src.customized_inferer import inferer_register

class Adds(GrpsTest):
    def test_infer(self):
        self.assertTrue(converter_register.converter_dict and inferer_register.model_inferer_dict)
        self.test_init()
        environ = flask.Flask("t").test_request_context("/x", method="POST", json={"a": 1, "b": 2})
        context = GrpsContext(http_request=environ.request)
        self.executor.infer(GrpsMessage(), context)
        self.assertFalse(context.has_err())
        response = context.get_http_response()
        self.assertEqual(response.status_code, 200)
        self.assertEqual(response.headers["Content-Type"], "application/json")
        self.assertEqual(response.response[0], b'{"c": 3}')
        self.assertEqual(response.headers["x-made-by"], "postprocess")

if __name__ == "__main__":
    suite = unittest.TestSuite([Adds("test_infer")])
    raise SystemExit(not unittest.TextTestRunner().run(suite).wasSuccessful())
"""


def test_a_projects_own_unit_test_passes(tmp_path) -> None:
    project = make(tmp_path / "p", INFERENCE, SERVER)
    (project / "src" / "customized_inferer.py").write_text(INFERER)
    (project / "src" / "customized_converter.py").write_text(CONVERTER)
    (project / "test.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "shmserve.grps", "test.py"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr
