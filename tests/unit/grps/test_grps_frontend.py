"""GRPS over HTTP against fake models: payloads, answers, errors."""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

import falcon.testing
import numpy as np
import pytest

from shmserve import waiting
from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome
from shmserve.frontends.http.routes.application import create_app
from shmserve.frontends.hub import Hub
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import GrpsMessage, GrpsStatus
from shmserve.grps.settings import GrpsSettings
from shmserve.tensor.spec import ModelSpec
from shmserve.testing.fake_dispatch import FakeDispatcher
from shmserve.testing.running_server import WATCHDOG_S
from tests.unit.grps import models_of_grps as models

PREDICT = "/grps/v1/infer/predict"
OK = {"code": 200, "msg": "OK", "status": "SUCCESS"}
FP32 = models.spec("m", [("IN", "FP32", (2, -1))], [("OUT", "FP32", (2, -1))])
TEXT = models.spec("t", [("IN", "BYTES", (-1,))], [("OUT", "BYTES", (-1,))])


class Client:
    """Client of the real application with one or more models."""

    def __init__(self, *served: tuple[ModelSpec, Any], **settings: Any) -> None:
        self.fake: FakeDispatcher = models.dispatcher(*served)
        self.app = create_app(self.fake, Settings(**settings))  # type: ignore[arg-type]
        self.client = falcon.testing.TestClient(self.app, headers={"Host": "localhost"})

    def post(self, body: Any, query: str = "", **headers: str) -> falcon.testing.Result:
        headers = {"Content-Type": "application/json", **headers}
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        answer = self.client.simulate_post(PREDICT + query, body=body, headers=headers)
        assert all(call.closed for call in self.fake.calls)
        return answer

    def binary(self, body: bytes, query: str = "") -> falcon.testing.Result:
        return self.post(body, query, **{"Content-Type": "application/octet-stream"})

    def get(self, path: str) -> falcon.testing.Result:
        return self.client.simulate_get(f"/grps/v1/{path}")


def refused(answer: falcon.testing.Result, status: int, *texts: str) -> None:
    assert answer.status_code == status, answer.text
    told = answer.json["status"]
    assert (told["code"], told["status"]) == (status, "FAILURE")
    for text in texts:
        assert text in told["msg"]
    assert len(told["msg"]) < 400
    assert "Traceback" not in told["msg"]


def gtensors(*tensors: dict[str, Any]) -> dict[str, Any]:
    return {"gtensors": {"tensors": list(tensors)}}


IN = {"name": "IN", "dtype": "DT_FLOAT32", "shape": [2, 2], "flat_float32": [1, 2.5, 0.1, 1e10]}
OUT = {**IN, "name": "OUT"}


class NotedHub(Hub):
    """A loop that records functions run beside the loop."""

    def __init__(self) -> None:
        super().__init__(2, "some_threads")
        self.beside_it: list[str] = []

    def beside(self, work: Any, *args: Any) -> Any:
        self.beside_it.append(work.__name__)
        return super().beside(work, *args)


def test_routes_that_never_block_hand_long_work_to_threads() -> None:
    hub, client = NotedHub(), Client((FP32, models.echo))
    large = {**IN, "shape": [2, 10_000], "flat_float32": [0.5] * 20_000}
    statuses: list[int] = []

    def ask() -> None:
        for tensor in (IN, large):
            statuses.append(client.post(gtensors(tensor)).status_code)
            hub.beside_it.append("answered")
        hub.leave()

    waiting.install(hub)
    try:
        hub.spawn(ask)
        hub.run(monotonic() + WATCHDOG_S)
    finally:
        waiting.install(None)
        hub.close()
    assert statuses == [200, 200]
    ours = [name for name in hub.beside_it if name != "echo"]
    assert ours == ["answered", "parse", "_write", "to_message", "encode", "answered"]


# ---------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", ["DT_FLOAT32", 7])
@pytest.mark.parametrize("name", ["IN", ""])
def test_tensors_meet_inputs_by_name_or_place(dtype: Any, name: str) -> None:
    answer = Client((FP32, models.echo)).post(gtensors({**IN, "dtype": dtype, "name": name}))
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {"status": OK, **gtensors(OUT)}
    assert list(answer.json) == ["status", "gtensors"]


def test_camel_case_is_understood() -> None:
    camel = {("flatFloat32" if k == "flat_float32" else k): v for k, v in IN.items()}
    assert Client((FP32, models.echo)).post(gtensors(camel)).json["gtensors"]["tensors"] == [OUT]


CASES: list[tuple[str, str, str, list[Any]]] = [
    ("UINT8", "DT_UINT8", "flat_uint8", [0, 255]),
    ("INT8", "DT_INT8", "flat_int8", [-128, 127]),
    ("INT16", "DT_INT16", "flat_int16", [-32768, 32767]),
    ("INT32", "DT_INT32", "flat_int32", [-(1 << 31), (1 << 31) - 1]),
    ("INT64", "DT_INT64", "flat_int64", [str(-(1 << 63)), str((1 << 63) - 1)]),
    ("FP16", "DT_FLOAT16", "flat_float16", [0.5, 65504.0]),
    ("FP32", "DT_FLOAT32", "flat_float32", [0.1, "NaN", "Infinity", "-Infinity"]),
    ("FP64", "DT_FLOAT64", "flat_float64", [0.1, 1e300, "NaN"]),
    ("BYTES", "DT_STRING", "flat_string", ["", "grüße"]),
    ("BOOL", "DT_UINT8", "flat_uint8", [0, 1]),
    ("UINT16", "DT_INT32", "flat_int32", [0, 65535]),
    ("UINT32", "DT_INT64", "flat_int64", ["0", "4294967295"]),
    ("UINT64", "DT_INT64", "flat_int64", ["0", "9223372036854775807"]),
    ("BF16", "DT_FLOAT32", "flat_float32", [0.5, 1.0]),
]


@pytest.mark.parametrize(("datatype", "dtype", "field", "values"), CASES)
def test_every_datatype_comes_back(
    datatype: str, dtype: str, field: str, values: list[Any]
) -> None:
    spec = models.spec("m", [("IN", datatype, (-1,))], [("OUT", datatype, (-1,))])
    sent = {"name": "IN", "dtype": dtype, "shape": [len(values)], field: values}
    client = Client((spec, models.echo))
    assert client.post(gtensors(sent)).json["gtensors"]["tensors"] == [{**sent, "name": "OUT"}]
    request = client.fake.calls[-1].request
    assert request is not None
    assert request.inputs["IN"].datatype == datatype


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"flat_float32": [1, 2, 3]}, ("'IN'", "4 elements", "3")),
        ({"shape": [3, 1], "flat_float32": [1, 2, 3]}, ("'IN'", "[2,-1]", "[3,1]")),
        ({"dtype": "DT_FLOAT64"}, ("DT_FLOAT64", "flat_float32")),
        ({"dtype": "DT_WRONG"}, ("DT_WRONG",)),
        ({"dtype": 77}, ("dtype", "77")),
        ({"dtype": None}, ("dtype",)),
        ({"name": "other"}, ("other",)),
        ({"flat_float32": ["x"]}, ("flat_float32[0]",)),
        ({"flat_float32": [1e300, 1, 1, 1]}, ("'IN'", "flat_float32", "range")),
        ({"shape": [-1]}, ("shape",)),
        ({"shape": [1 << 40]}, ("shape",)),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, Any], texts: tuple[str, ...]) -> None:
    refused(Client((FP32, models.echo)).post(gtensors({**IN, **change})), 400, *texts)


def test_a_value_that_the_datatype_cannot_hold() -> None:
    spec = models.spec("m", [("IN", "INT8", (1,))], [("OUT", "INT8", (1,))])
    sent = {"name": "IN", "dtype": "DT_INT8", "shape": [1], "flat_int8": [1000]}
    refused(Client((spec, models.echo)).post(gtensors(sent)), 400, "'IN'", "-128 to 127")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([IN, IN], "twice"),
        ([IN, {**IN, "name": ""}], "names"),
        ([{**IN, "name": ""}, {**IN, "name": ""}], "1 inputs"),
        ([], "missing required input"),
    ],
)
def test_sets_of_tensors_that_do_not_fit(tensors: list[Any], text: str) -> None:
    refused(Client((FP32, models.echo)).post(gtensors(*tensors)), 400, text)


def test_the_batch_is_part_of_the_shape() -> None:
    spec = models.spec("m", [("IN", "FP32", (-1, 2))], [("OUT", "FP32", (-1, 2))], batch=4)
    client = Client((spec, models.echo))
    assert client.post(gtensors(IN)).json["gtensors"]["tensors"] == [OUT]
    many = {**IN, "shape": [5, 2], "flat_float32": [0] * 10}
    refused(client.post(gtensors(many)), 400, "<= 4")


# ---------------------------------------------------------------------- ndarray


@pytest.mark.parametrize(
    "values", [[[1, 2, 3], [4, 5, 6]], [[0.1], [-2.5]], [[True, 2], [3.5, False]]]
)
def test_ndarray_in_and_out(values: Any) -> None:
    client = Client((FP32, models.echo))
    answer = client.post({"ndarray": values}, "?return-ndarray=TRUE")
    assert answer.json == {"status": OK, "ndarray": values}
    tensors = client.post({"ndarray": values}).json["gtensors"]["tensors"]
    assert tensors[0]["shape"] == list(np.shape(values))


def test_ndarray_of_one_number_and_of_none() -> None:
    spec = models.spec("m", [("IN", "FP32", ())], [("OUT", "FP32", ())])
    answer = Client((spec, models.echo)).post({"ndarray": 5}, "?return-ndarray=true")
    assert answer.json["ndarray"] == 5
    empty = Client((FP32, models.echo)).post({"ndarray": [[], []]}, "?return-ndarray=true")
    assert empty.json["ndarray"] == [[], []]


def test_ndarray_answers_are_valid_json() -> None:
    body = b'{"ndarray": [[NaN, Infinity], [1, 2]]}'
    answer = Client((FP32, models.echo)).post(body, "?return-ndarray=true")
    assert answer.json["ndarray"] == [["NaN", "Infinity"], [1, 2]]


@pytest.mark.parametrize("values", [[[1, 2], [3]], [["a", "b"]], [], [[1, None]], "x", [[1, {}]]])
def test_ndarrays_that_are_none(values: Any) -> None:
    refused(Client((FP32, models.echo)).post({"ndarray": values}), 400, "ndarray")


def test_ndarray_wanted_of_something_else() -> None:
    answer = Client((TEXT, models.echo)).post({"str_data": "x"}, "?return-ndarray=true")
    refused(answer, 500, "No float32 tensors in output. Cannot convert to ndarray.")
    answer = Client((FP32, models.echo)).post(
        {"ndarray": [[1], [2]]}, "?return-ndarray=true&streaming=true"
    )
    refused(answer, 400, "Streaming and ret ndarray")


# -------------------------------------------------------------- text and bytes


def test_text_meets_a_bytes_input() -> None:
    client = Client((TEXT, models.echo))
    assert client.post({"str_data": "grüße"}).json == {"status": OK, "str_data": "grüße"}
    assert client.post({"str_data": ""}).json == {"status": OK, "str_data": ""}
    answer = client.binary(b"\xff\x00")
    assert (answer.headers["content-type"], answer.content) == (
        "application/octet-stream",
        b"\xff\x00",
    )


def test_bytes_meet_a_uint8_input_without_a_copy() -> None:
    spec = models.spec("m", [("IN", "UINT8", (-1,))], [("OUT", "UINT8", (-1,))])
    client = Client((spec, models.echo))
    assert client.binary(b"\x01\x02\xff").content == b"\x01\x02\xff"
    assert client.fake.calls[-1].receipt.copied_out == 0
    refused(client.post({"str_data": "x"}), 400, "str_data", "UINT8")


def test_parameters_name_the_places_for_text() -> None:
    spec = models.spec(
        "m",
        [("IN", "BYTES", (1,)), ("K", "INT32", (1,), True)],  # type: ignore[list-item]
        [("OUT", "BYTES", (1,)), ("N", "INT32", (1,))],
        grps_input="IN",
        grps_output="OUT",
    )
    run = models.answering(N=np.array([7], np.int32), OUT=np.array(["answer"], object))
    assert Client((spec, run)).post({"str_data": "x"}).json["str_data"] == "answer"


def test_several_outputs_are_tensors() -> None:
    run = models.answering(A=np.array([1], np.int32), B=np.array(["x"], object))
    spec = models.spec("m", [("IN", "BYTES", (1,))], [("A", "INT32", (1,)), ("B", "BYTES", (1,))])
    tensors = Client((spec, run)).post({"str_data": "x"}).json["gtensors"]["tensors"]
    assert [t["name"] for t in tensors] == ["A", "B"]


def test_payloads_without_a_place() -> None:
    client = Client((FP32, models.echo))
    refused(client.post({"str_data": "x"}), 400, "str_data", "IN FP32")
    refused(client.binary(b"x"), 400, "bin_data", "IN FP32")
    refused(client.post({"gmap": {"s_s": {"a": "b"}}}), 400, "gmap")


def test_text_that_is_none_is_the_models_fault() -> None:
    run = models.answering(OUT=np.array([b"\xff"], object))
    refused(Client((TEXT, run)).post({"str_data": "x"}), 500, "'OUT'", "UTF-8")


# ------------------------------------------------- models that take the message


MAPS = {
    "s_s": {"a": "b"},
    "s_b": {"a": "aGVsbG8="},
    "s_i32": {"a": -1},
    "s_i64": {"a": "-9223372036854775808"},
    "s_f": {"a": 0.1},
    "s_d": {"a": "NaN"},
}


@pytest.mark.parametrize(
    "body",
    [{"str_data": "x"}, {"gmap": MAPS}, gtensors(IN), gtensors(), {"str_data": "x", "model": ""}],
)
def test_messages_pass_through(body: dict[str, Any]) -> None:
    client = Client((models.message_spec(), models.echo))
    wanted = {k: v for k, v in body.items() if v != ""}
    if body == gtensors():
        wanted = {"gtensors": {}}
    assert client.post(body).json == {"status": OK, **wanted}


def test_bytes_are_received_into_the_message() -> None:
    client = Client((models.message_spec(), models.echo))
    assert client.binary(b"\xff" * 1000).content == b"\xff" * 1000
    request = client.fake.calls[-1].request
    assert request is not None
    message = message_wire.parse(request.inputs["grps"].view)
    assert (message.which, bytes(message.bin_data or b"")) == ("bin_data", b"\xff" * 1000)


def test_the_worker_is_told_what_was_asked() -> None:
    client = Client((models.message_spec(), models.echo))
    client.post({"str_data": "x"}, "?model=your_model-1.0.0&streaming=true")
    request = client.fake.calls[-1].request
    assert request is not None
    assert request.parameters == {"grps_streaming": True, "grps_model": "your_model-1.0.0"}


@pytest.mark.parametrize(
    ("status", "http"),
    [(GrpsStatus(404, "gone", 2), 404), (GrpsStatus(7, "", 2), 500), (GrpsStatus(), 200)],
)
def test_the_models_own_status(status: GrpsStatus, http: int) -> None:
    def run(request: Any) -> Outcome:
        return models.message(GrpsMessage(status=status, str_data="x"))

    answer = Client((models.message_spec(), run)).post({"str_data": "x"})
    assert answer.status_code == http
    assert answer.json["str_data"] == "x"


def test_a_model_that_gives_no_message() -> None:
    run = models.answering(grps=np.frombuffer(b"\xff\xff", np.uint8))
    refused(Client((models.message_spec(), run)).post({"str_data": "x"}), 500, "no GRPS message")


# -------------------------------------------------------------------- streaming


def stream_client(run: Any = models.streaming, **parameters: str) -> Client:
    return Client((models.message_spec(decoupled="true", **parameters), run))


def test_a_stream_has_a_chunk_per_answer() -> None:
    answer = stream_client().post({"str_data": "x"}, "?streaming=TRUE")
    one, two = ({"status": OK, "str_data": f"stream data {n}"} for n in (1, 2))
    compact = [json.dumps(m, separators=(",", ":")).encode() for m in (one, two)]
    assert answer.content == b"".join(compact) + b"\xff\x00"
    assert answer.headers["content-type"] == "application/octet-stream"


def test_one_answer_of_a_streaming_model() -> None:
    assert stream_client().post({"str_data": "x"}).json["str_data"] == "one answer"


def test_a_stream_that_fails_says_so_at_its_end() -> None:
    answer = stream_client(models.breaking).post({"str_data": "x"}, "?streaming=true")
    assert answer.status_code == 200
    first, _, last = answer.text.partition("}{")
    assert json.loads(first + "}")["str_data"] == "first"
    assert json.loads("{" + last)["status"] == {
        "code": 500,
        "msg": "the model broke",
        "status": "FAILURE",
    }


def test_a_stream_that_fails_at_once_has_a_status() -> None:
    client = Client((models.message_spec(), models.refusing))
    refused(client.post({"str_data": "x"}, "?streaming=true"), 500, "the model said no")
    refused(client.post(b"{", "?streaming=true"), 400)


def test_several_answers_where_one_was_asked_for() -> None:
    def run(request: Any) -> Any:
        yield models.message(GrpsMessage(str_data="1"))
        yield models.message(GrpsMessage(str_data="2"))

    refused(stream_client(run).post({"str_data": "x"}), 400, "ask for streaming")


def test_streaming_by_header_and_by_body() -> None:
    by_header = stream_client(
        grps_streaming_ctrl_mode="header_param",
        grps_streaming_ctrl_key="X-Stream",
        grps_streaming_ctrl_content_type="text/event-stream",
    )
    answer = by_header.post({"str_data": "x"}, **{"X-Stream": "True"})
    assert answer.headers["content-type"] == "text/event-stream"
    assert b"stream data 2" in answer.content
    assert by_header.post({"str_data": "x"}, "?streaming=true").json["str_data"] == "one answer"
    by_body = stream_client(grps_streaming_ctrl_mode="body_param", grps_streaming_ctrl_key="stream")
    assert b"stream data 2" in by_body.post({"str_data": "x", "stream": True}).content
    assert by_body.post({"str_data": "x", "stream": "true"}).json["str_data"] == "one answer"


# ----------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "JSON"),
        (b"\xff", "UTF-8"),
        (b"[]", "object"),
        (b"{}", "no payload"),
        (b'{"str_data": null}', "no payload"),
        (b'{"bin_data": "aGk="}', "application/octet-stream"),
        (b'{"str_data": "a", "gmap": {}}', "several payloads"),
        (b'{"str_data": 1}', "str_data"),
        (b'{"str_data": "\\ud800"}', "Unicode"),
        (b'{"model": 5, "str_data": "a"}', "model"),
        (b'{"gmap": {"s_i32": {"a": 2147483648}}}', "s_i32"),
        (b'{"gmap": {"s_b": {"a": "?"}}}', "base64"),
        (b'{"str_data":' + b"[" * 100000, ""),
        (b"", "The http body is empty."),
    ],
)
def test_requests_that_are_malformed(body: bytes, text: str) -> None:
    refused(Client((models.message_spec(), models.echo)).post(body), 400, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("text/plain", "Unsupported content type."), ("", "No content type in headers.")],
)
def test_content_types(kind: str, text: str) -> None:
    client = Client((models.message_spec(), models.echo))
    headers = {"Content-Type": kind} if kind else {}
    answer = client.client.simulate_post(PREDICT, body=b'{"str_data":"x"}', headers=headers)
    refused(answer, 400, text)
    for accepted in ("application/json; charset=utf-8", "Application/JSON"):
        assert client.post({"str_data": "x"}, **{"Content-Type": accepted}).status_code == 200


def test_models_that_are_not_there() -> None:
    client = Client((models.message_spec(), models.echo), (FP32, models.echo))
    refused(client.post({"str_data": "x", "model": "other-1.0.0"}), 404, "'other-1.0.0'")
    refused(client.post({"str_data": "x", "model": "your_model"}), 404, "name-version")
    models.unready(client.fake, "your_model")
    refused(client.post({"str_data": "x", "model": "your_model-1.0.0"}), 503)


def test_requests_that_name_no_model() -> None:
    grps = (models.message_spec(), models.echo)
    only = Client(grps, (FP32, models.echo), (TEXT, models.echo))  # the one meant for GRPS
    assert only.post({"str_data": "x"}).json["str_data"] == "x"
    assert only.fake.calls[-1].entry.spec.name == "your_model"
    for served in (
        [(FP32, models.echo), (TEXT, models.echo)],
        [grps, (models.message_spec("b"), 0)],
    ):
        refused(Client(*served).post({"str_data": "x"}), 400, "no default model")


def test_the_payloads_model_wins_over_the_querys() -> None:
    client = Client((models.message_spec(), models.echo), (TEXT, models.echo))
    answer = client.post({"str_data": "x", "model": "t-1"}, "?model=your_model-1.0.0")
    assert answer.json == {"status": OK, "str_data": "x"}
    assert client.fake.calls[-1].entry.spec.name == "t"
    client.post({"str_data": "x"}, "?model=your_model-1.0.0")
    assert client.fake.calls[-1].entry.spec.name == "your_model"
    client.binary(b"x", "?model=t-1.0.0")
    assert client.fake.calls[-1].entry.spec.name == "t"


@pytest.mark.parametrize("name", ["t-1", "t"])
def test_the_default_model(name: str) -> None:
    client = Client(
        (models.message_spec(), models.echo),
        (TEXT, models.echo),
        extensions={"grps": GrpsSettings(default_model=name)},
    )
    client.post({"str_data": "x"})
    assert client.fake.calls[-1].entry.spec.name == "t"


def test_failures_of_the_model_and_of_the_server() -> None:
    def defect(request: Any) -> Any:
        raise RuntimeError("/home/secret/model.py")

    refused(Client((TEXT, models.refusing)).post({"str_data": "x"}), 500, "the model said no")
    answer = Client((TEXT, defect)).post({"str_data": "x"})
    refused(answer, 500)
    assert "secret" not in answer.text
    full = Client((TEXT, models.echo))
    full.fake.budget = 1
    refused(full.post({"str_data": "too long"}), 503)


def test_paths_and_methods_below_grps() -> None:
    client = Client((TEXT, models.echo))
    refused(client.get("other"), 404)
    refused(client.get("infer/predict"), 405)
    assert client.client.simulate_get("/other").json == {"error": "Not Found"}


def test_a_request_too_large() -> None:
    small = Client((models.message_spec(), models.echo), max_tensor_bytes=10, max_json_bytes=20)
    refused(small.binary(b"x" * 11), 413, "max_tensor_bytes")
    refused(small.post({"str_data": "x" * 50}), 413, "max_json_bytes")


def test_the_receipt() -> None:
    spec = models.spec("m", [("IN", "UINT8", (-1,))], [("OUT", "UINT8", (-1,))])
    answer = Client((spec, models.echo)).client.simulate_post(
        PREDICT,
        body=b"abc",
        headers={"Content-Type": "application/octet-stream", "shmserve-receipt": "1"},
    )
    assert json.loads(answer.headers["shmserve-receipt"])["copied_bytes"]["out"] == 0


# --------------------------------------------------------------------- the rest


def test_health_and_the_online_flag() -> None:
    client = Client((TEXT, models.echo))
    assert client.get("health/live").json == {"status": OK}
    refused(client.get("health/ready"), 503, "Service Unavailable")
    assert client.get("health/online").json == {"status": OK}
    assert client.get("health/ready").json == {"status": OK}
    post = client.client.simulate_post("/grps/v1/health/offline", body=b"{}")
    assert post.json == {"status": OK}
    refused(client.get("health/ready"), 503)
    assert client.post({"str_data": "x"}).status_code == 200  # offline stops nobody
    client.get("health/online")
    models.unready(client.fake, "t")
    refused(client.get("health/ready"), 503)
    client.fake.published = False
    refused(client.get("health/ready"), 503)


def test_metadata_of_ordinary_models() -> None:
    import yaml

    client = Client((models.message_spec(), models.echo), (FP32, models.echo))
    document = yaml.safe_load(client.get("metadata/server").json["str_data"])
    assert set(document) >= {"models", "dag", "interface", "max_connections", "max_concurrency"}
    names = {(m["name"], m["version"]) for m in document["models"]}
    assert names == {("your_model", "1.0.0"), ("m", "1.0.0")}

    def model(name: Any) -> falcon.testing.Result:
        return client.client.simulate_post(
            "/grps/v1/metadata/model", json={"str_data": name} if name is not None else {}
        )

    for name in ("your_model", "your_model-1.0.0"):
        told = yaml.safe_load(model(name).json["str_data"])
        assert (told["name"], told["version"], told["inp_device"]) == ("your_model", "1.0.0", None)
        assert list(told) == sorted(told)
    refused(model("other"), 404, "Model not found.")
    refused(model(None), 400, "No model name.")
    refused(model(""), 400, "The model name is empty.")
    refused(model(5), 400, "str_data")


def test_metadata_of_a_project() -> None:
    inference = "# ours\nmodels:\n  - {name: net, version: 2.1.0, device: cpu}\n"
    spec = models.message_spec(
        "folder",
        grps_models="net-2.1.0",
        grps_inference_yml=inference,
        grps_server_yml="interface:\n  port: 1,2\n",
    )
    client = Client((spec, models.echo))
    text = client.get("metadata/server").json["str_data"]
    assert text == inference + "\ninterface:\n  port: 1,2\n"
    answer = client.client.simulate_post("/grps/v1/metadata/model", json={"str_data": "net"})
    assert "version: 2.1.0" in answer.json["str_data"]
    client.post({"str_data": "x", "model": "net-2.1.0"})
    assert client.fake.calls[-1].entry.spec.name == "folder"
