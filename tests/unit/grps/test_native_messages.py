"""Native workers that take GRPS messages and custom HTTP requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve import grps
from shmserve.errors import ShmserveError
from shmserve.executor.backend import Response
from shmserve.grps.protocol import custom_http, message_wire
from shmserve.grps.protocol.custom_http import HttpAnswer, RequestHead
from shmserve.grps.protocol.grps_message import GrpsMessage, StatusFlag
from shmserve.testing import backend_runner
from shmserve.testing.model_files import model_maker

TALK = Path(__file__).parents[2] / "repositories" / "grps" / "talk"
CONFIG = """
backend: "python"
parameters [ { key: "grps" value { string_value: "message" } },
             { key: "grps_http_path" value { string_value: "/own" } },
             { key: "grps_http_body" value { string_value: "true" } } ]
"""
CODE = """
import numpy as np
from shmserve import grps

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
    backend, spec = backend_runner.load(model_maker(tmp_path)(CODE, CONFIG))

    def asker(**inputs: bytes) -> Response:
        arrays: dict[str, Any] = {
            name: np.frombuffer(data, np.uint8) for name, data in inputs.items()
        }
        return backend_runner.ask(backend, spec, **arrays)

    return asker


def answer(ask: Ask, message: GrpsMessage) -> GrpsMessage:
    array = backend_runner.arrays(ask(grps=message_wire.encode(message)))["grps"]
    return message_wire.parse(array.tobytes())


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
    assert backend_runner.failure(ask(grps=b"\xff")).http_status == 400


def test_what_is_written_into_the_slot_is_counted(ask: Ask) -> None:
    response = ask(grps=message_wire.encode(GrpsMessage(bin_data=b"x" * 1000)))
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
    head = custom_http.encode(RequestHead("PUT", "/own"))
    outputs = backend_runner.arrays(ask(http=head, http_body=body))
    found = (custom_http.decode_answer(outputs["http"].tobytes()), outputs["http_body"].tobytes())
    assert found == expected


@pytest.fixture
def talk() -> Callable[..., backend_runner.FakeResponses]:
    backend, spec = backend_runner.load(str(TALK))

    def talker(streaming: bool, **inputs: bytes) -> backend_runner.FakeResponses:
        arrays: dict[str, Any] = {
            name: np.frombuffer(data, np.uint8) for name, data in inputs.items()
        }
        responses = backend_runner.ask_stream(
            backend, spec, {"grps_streaming": streaming}, **arrays
        )
        assert responses.ended.wait(30)
        return responses

    return talker


def test_a_stream_of_messages(talk: Any) -> None:
    def texts(told: backend_runner.FakeResponses) -> list[str | None]:
        found = [backend_runner.arrays(response)["grps"].tobytes() for response in told.sent]
        return [message_wire.parse(data).str_data for data in found]

    message = message_wire.encode(GrpsMessage(str_data="a b c"))
    assert texts(talk(True, grps=message)) == ["a", "b", "c"]
    assert texts(talk(False, grps=message)) == ["a b c"]
    told = talk(True, grps=message_wire.encode(GrpsMessage(str_data="a raise")))
    assert texts(told) == ["a"]
    assert [error.message for error in told.errors] == ["lost for words"]


def test_a_stream_of_custom_http(talk: Any) -> None:
    head = custom_http.encode(RequestHead("POST", "/talk"))
    parts = [backend_runner.arrays(r) for r in talk(True, http=head, http_body=b"a b").sent]
    assert [part["http_body"].tobytes() for part in parts] == [b"a;", b"b;"]
    heads = [custom_http.decode_answer(part["http"].tobytes()) for part in parts if "http" in part]
    assert heads == [HttpAnswer(200, (("Content-Type", "text/event-stream"),))]
    (part,) = [backend_runner.arrays(r) for r in talk(False, http=head, http_body=b"a b").sent]
    assert part["http_body"].tobytes() == b"a b;"
