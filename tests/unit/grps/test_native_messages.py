"""Native workers that take GRPS messages and custom HTTP requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import ShmserveError
from shmserve.executor.backend import Response
from shmserve.grps import projects as grps
from shmserve.grps.protocol import custom_http as grps_http
from shmserve.grps.protocol import message_wire as grps_wire
from shmserve.grps.protocol.custom_http import HttpAnswer, HttpRequest
from shmserve.grps.protocol.message import GrpsMessage, StatusFlag
from shmserve.testing import backend_runner as backends
from shmserve.testing.model_files import model_maker

CONFIG = """
backend: "python"
parameters [ { key: "grps" value { string_value: "message" } },
             { key: "grps_http_path" value { string_value: "/own" } },
             { key: "grps_http_body" value { string_value: "true" } } ]
"""
CODE = """
import numpy as np
from shmserve.grps import projects as grps

class Model:
    def infer(self, request):
        if request.http is not None:
            body = request.http.data
            return (body[::-1], 201, {"X-Path": request.http.path}) if body else request.http.method
        message = request.grps
        if message.which == "str_data":
            if message.str_data == "raise":
                raise ValueError("not this")
            if message.str_data == "refuse":
                return grps.failure("refused", 418)
            if message.str_data == "wrong":
                return {"grps": 3}
            return grps.Message(str_data=message.str_data.upper())
        if message.which == "bin_data":
            return grps.Message(bin_data=message.bin_data)
        if message.which == "gmap":
            return grps.Message(gmap=grps.Map(s_i64={k: -v for k, v in message.gmap.s_i64.items()}))
        tensors = [grps.Tensor.of(t.name, t.array * 2) for t in message.gtensors]
        return grps.Message(gtensors=tensors, model=message.model)
"""

Ask = Callable[..., Response]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    backend, spec = backends.load(model_maker(tmp_path)(CODE, CONFIG))

    def asker(**inputs: bytes) -> Response:
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in inputs.items()}
        return backends.ask(backend, spec, **arrays)

    return asker


def answer(ask: Ask, message: GrpsMessage) -> GrpsMessage:
    array = backends.arrays(ask(grps=grps_wire.encode(message)))["grps"]
    return grps_wire.parse(array.tobytes())


def test_messages_of_every_kind(ask: Ask) -> None:
    said = answer(ask, GrpsMessage(str_data="hi"))
    assert said.str_data == "HI"
    assert said.status == grps.Status(200, "OK", StatusFlag.SUCCESS)
    assert answer(ask, GrpsMessage(bin_data=b"\0\1")).bin_data == b"\0\1"
    mapped = answer(ask, GrpsMessage(gmap=grps.Map(s_i64={"a": 5}))).gmap
    assert mapped == grps.Map(s_i64={"a": -5})
    tensors = [grps.Tensor.of("x", np.arange(6).reshape(2, 3)), grps.Tensor.of("y", [0.5])]
    doubled = answer(ask, GrpsMessage(gtensors=tensors, model="m-1"))
    assert doubled.tensor("x").array.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert doubled.tensor("y").array.tolist() == [1.0]
    assert doubled.model == "m-1"


def test_errors(ask: Ask) -> None:
    with pytest.raises(ShmserveError, match="not this") as caught:
        answer(ask, GrpsMessage(str_data="raise"))
    assert caught.value.http_status == 500
    refused = answer(ask, GrpsMessage(str_data="refuse"))
    assert refused.status == grps.Status(418, "refused", StatusFlag.FAILURE)
    with pytest.raises(ShmserveError, match=r"must give a grps\.Message, got dict"):
        answer(ask, GrpsMessage(str_data="wrong"))
    assert backends.failure(ask(grps=b"\xff")).http_status == 400


def test_what_is_written_into_the_slot_is_counted(ask: Ask) -> None:
    response = ask(grps=grps_wire.encode(GrpsMessage(bin_data=b"x" * 1000)))
    assert response.copied == response.outputs[0].array.nbytes > 1000


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b"abc",
            (
                HttpAnswer(201, (("X-Path", "/own"), ("Content-Type", "application/octet-stream"))),
                b"cba",
            ),
        ),
        (b"", (HttpAnswer(200, (("Content-Type", "text/plain"),)), b"PUT")),
    ],
)
def test_custom_http(ask: Ask, body: bytes, expected: Any) -> None:
    head = grps_http.encode(HttpRequest("PUT", "/own"))
    outputs = backends.arrays(ask(http=head, http_body=body))
    found = (
        grps_http.decode_answer(outputs["http"].tobytes()),
        outputs["http_body"].tobytes(),
    )
    assert found == expected


@pytest.fixture
def talk() -> Callable[..., backends.FakeResponses]:
    backend, spec = backends.load(str(Path(__file__).parents[1] / "grps_models" / "talk"))

    def talker(streaming: bool, **inputs: bytes) -> backends.FakeResponses:
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in inputs.items()}
        responses = backends.ask_stream(backend, spec, {"grps_streaming": streaming}, **arrays)
        assert responses.ended.wait(30)
        return responses

    return talker


def test_a_stream_of_messages(talk: Any) -> None:
    def texts(told: backends.FakeResponses) -> list[str | None]:
        found = [backends.arrays(response)["grps"].tobytes() for response in told.sent]
        return [grps_wire.parse(data).str_data for data in found]

    message = grps_wire.encode(GrpsMessage(str_data="a b c"))
    assert texts(talk(True, grps=message)) == ["a", "b", "c"]
    assert texts(talk(False, grps=message)) == ["a b c"]
    told = talk(True, grps=grps_wire.encode(GrpsMessage(str_data="a raise")))
    assert texts(told) == ["a"]
    assert [error.message for error in told.errors] == ["lost for words"]


def test_a_stream_of_custom_http(talk: Any) -> None:
    head = grps_http.encode(HttpRequest("POST", "/talk"))
    parts = [backends.arrays(r) for r in talk(True, http=head, http_body=b"a b").sent]
    assert [part["http_body"].tobytes() for part in parts] == [b"a;", b"b;"]
    heads = [grps_http.decode_answer(part["http"].tobytes()) for part in parts if "http" in part]
    assert heads == [HttpAnswer(200, (("Content-Type", "text/event-stream"),))]
    (part,) = [backends.arrays(r) for r in talk(False, http=head, http_body=b"a b").sent]
    assert part["http_body"].tobytes() == b"a b;"
