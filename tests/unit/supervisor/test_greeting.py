"""The message to the operator when the service is ready."""

import json
import shlex

import pytest
from msgspec.structs import replace

from shmserve.core.registry import ANY
from shmserve.protocol.oip.json_calls import JsonCallSchemas, encode_schemas
from shmserve.supervisor.greeting import Doors, StartReport, greeting
from shmserve.tensor.spec import TensorSpec
from tests.unit.supervisor.snapshots import LOADING, READY, entry, snapshot

SMALL = TensorSpec("IN", "FP32", (-1, 2))
LARGE = TensorSpec("IN", "FP32", (3, 224, 224))
TEXT = TensorSpec("TEXT", "BYTES", (1,))
HTTP = Doors(("http://0.0.0.0:8000", "unix:/x"), ("127.0.0.1:8001",))


def test_what_runs_where_and_a_first_request_that_works():
    models = snapshot(large=entry("large", LARGE), small=entry("small", SMALL, TEXT))
    lines = list(greeting(models, HTTP))
    assert lines[:3] == [
        "HTTP: http://0.0.0.0:8000 unix:/x, gRPC: 127.0.0.1:8001",
        "models: large/1 (1 on cpu), small/1 (1 on cpu)",
        "page: http://127.0.0.1:8000/",
    ]
    words = shlex.split(lines[3].removeprefix("try: "))
    assert words[:3] == ["curl", "http://127.0.0.1:8000/v2/models/small/infer", "-d"]
    assert json.loads(words[3])["inputs"] == [
        {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]},
        {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [""]},
    ]


def test_a_first_request_of_plain_values():
    tensor = TensorSpec("json", "BYTES", (1,))
    body = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "size": {"$ref": "#/components/schemas/m.Size"}},
        "required": ["text", "size"],
    }
    size = {"properties": {"w": {"anyOf": [{"type": "integer"}]}}, "required": ["w"]}
    schemas = JsonCallSchemas(body=body, components={"m.Size": size})
    made = entry("m", tensor)
    spec = replace(
        made.spec,
        inputs=(tensor,),
        outputs=(tensor,),
        parameters={"json_schema": encode_schemas(schemas)},
    )
    line = list(greeting(snapshot(m=replace(made, spec=spec)), HTTP))[-1]
    assert shlex.split(line) == [
        *("try:", "curl", "http://127.0.0.1:8000/models/m", "-d"),
        '{"text": "", "size": {"w": 0}}',
    ]


@pytest.mark.parametrize(
    ("doors", "last"),
    [
        (HTTP, "try: curl http://127.0.0.1:8000/v2"),
        (Doors(("unix:/x",)), "try: curl --unix-socket /x http://localhost/v2"),
        (Doors(("https://[::1]:8",), page=False), "try: curl -k https://[::1]:8/v2"),
        (Doors(grpc=("127.0.0.1:8001",)), "models: large/1 (1 on cpu), stream/1 (1 on cpu)"),
    ],
)
def test_a_first_request_by_every_door(doors, last):
    stream = entry("stream", SMALL, decoupled=True)
    assert list(greeting(snapshot(large=entry("large", LARGE), stream=stream), doors))[-1] == last


def test_not_all_of_many_models_are_named():
    models = {f"m{number:02}": entry(f"m{number:02}") for number in range(100)}
    assert list(greeting(snapshot(**models), HTTP))[1].endswith("m11/1 (1 on cpu) and 88 more")


def test_readiness_is_told_once_and_that_of_all_models_when_it_comes(caplog):
    caplog.set_level("INFO")
    report = StartReport(0.0, HTTP)
    loading = entry("b", state=LOADING)
    part = replace(snapshot(a=entry("a"), b=loading), requires=ANY)
    report.published(replace(snapshot(b=loading), requires=ANY))
    assert caplog.messages == []
    report.published(part)
    report.published(part)
    assert caplog.messages[0].endswith(" s: ready_requires is any")
    assert len(caplog.messages) == 5
    report.published(snapshot(a=entry("a"), b=entry("b")))
    report.published(snapshot(a=entry("a"), b=entry("b")))
    assert len(caplog.messages) == 6
    assert caplog.messages[5].startswith("all models ready after ")


def test_a_start_with_a_broken_model_tells_where_the_others_are(caplog):
    caplog.set_level("INFO")
    report = StartReport(0.0, HTTP)
    report.published(snapshot(a=LOADING, failed={"b": "why"}))
    report.published(replace(snapshot(a=READY, failed={"b": "why"}), unserved={"http": "why"}))
    assert caplog.messages == []
    report.published(snapshot(a=READY, failed={"b": "why"}))
    assert caplog.messages[0].startswith("not ready after ")
    assert caplog.messages[0].endswith(" s, other models serve: 'b' cannot be served")
    assert caplog.messages[1].startswith("HTTP: http://")
    report.published(snapshot(a=READY))
    assert caplog.messages[-1].startswith("all models ready after ")


def test_a_start_with_broken_models_alone_does_not_speak_of_others(caplog):
    StartReport(0.0, HTTP).published(snapshot(failed={"b": "why"}))
    assert caplog.messages[0].endswith(" s, no model serves: 'b' cannot be served")


def test_a_start_without_models_does_not_speak_of_all_models(caplog):
    caplog.set_level("INFO")
    StartReport(0.0, HTTP).published(snapshot())
    assert caplog.messages[0].startswith("ready after ")
    assert caplog.messages[0].endswith(" s, without a model")
