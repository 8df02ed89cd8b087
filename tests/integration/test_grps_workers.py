"""GRPS projects, message workers and pipelines in real processes; this process is a frontend."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmserve._generated import grps_pb2
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.errors import ExecutorLost, ModelFailure, ShmserveError, Unavailable, WorkLost
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import HttpAnswer, RequestHead
from tests.holding import kill_executor
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import served

Array = np.ndarray[Any, Any]
PIPELINES = "line=scale,shift,scale;words=chain,native,echo;bad=native,shift"


MODELS = ROOT / "tests" / "repositories" / "grps"
server = served(MODELS, grps_pipelines=PIPELINES, arena_bytes=4 << 20)


def answers(
    frontend: Dispatcher, model: str, parameters: dict[str, Any] | None = None, **inputs: bytes
) -> list[dict[str, bytes]]:
    """Return the outputs of every answer. Raise an error only after earlier answers have been
    checked."""
    found: list = []
    options = RunOptions(parameters=parameters or {})
    with frontend.call(frontend.ready_model(model), options) as call:
        for name, data in inputs.items():
            reservation = call.reserve(len(data))
            reservation.view[:] = data
            call.add_input(name, "UINT8", (len(data),), reservation)
        for outcome in call.stream():
            if outcome.error is not None:
                assert outcome.final
                outcome.error.args = (*outcome.error.args, found)
                raise outcome.error
            if outcome.outputs:
                found.append({tensor.name: bytes(tensor.view) for tensor in outcome.outputs})
    return found


def say(frontend: Dispatcher, model: str, text: str, named: str = "") -> str:
    message = grps_pb2.GrpsMessage(str_data=text, model=named).SerializeToString()
    (outputs,) = answers(frontend, model, grps=message)
    return str(grps_pb2.GrpsMessage.FromString(outputs["grps"]).str_data)


def texts(found: list[dict[str, bytes]]) -> list[str]:
    return [grps_pb2.GrpsMessage.FromString(outputs["grps"]).str_data for outputs in found]


def test_projects_and_message_workers_answer(frontend: Dispatcher) -> None:
    assert say(frontend, "echo", "hi") == "hi!"
    assert say(frontend, "native", "abc") == "cba"
    assert say(frontend, "chain", "x") == "xab/1"
    assert say(frontend, "chain", "x", named="first-1.0.0") == "xa"
    message = grps_pb2.GrpsMessage()
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[3], flat_float32=[1, 2, 3])
    for model, expected in (("echo", [1, 2, 3]), ("native", [2, 4, 6])):
        (outputs,) = answers(frontend, model, grps=message.SerializeToString())
        answer = grps_pb2.GrpsMessage.FromString(outputs["grps"])
        assert answer.gtensors.tensors[0].flat_float32 == expected


def test_a_large_binary_message(frontend: Dispatcher) -> None:
    data = np.random.default_rng(1).bytes(6 << 20)
    message = grps_pb2.GrpsMessage(bin_data=data).SerializeToString()
    for model, expected in (("echo", data), ("native", data[::-1])):
        (outputs,) = answers(frontend, model, grps=message)
        assert grps_pb2.GrpsMessage.FromString(outputs["grps"]).bin_data == expected


def test_a_stream_is_whole_and_its_error_the_last_word(frontend: Dispatcher) -> None:
    words = [str(number) for number in range(300)]
    message = grps_pb2.GrpsMessage(str_data=" ".join(words)).SerializeToString()
    found = answers(frontend, "echo", {"grps_streaming": True}, grps=message)
    assert texts(found) == [f"{word}!" for word in words]
    found = answers(frontend, "talk", {"grps_streaming": True}, grps=message)
    assert texts(found) == words
    message = grps_pb2.GrpsMessage(str_data="a b raise").SerializeToString()
    with pytest.raises(ModelFailure, match="the stream broke") as caught:
        answers(frontend, "echo", {"grps_streaming": True}, grps=message)
    assert texts(caught.value.args[-1]) == ["a!", "b!"]


def test_errors(frontend: Dispatcher, server: RunningServer) -> None:
    with pytest.raises(ShmserveError, match="cannot echo this, see <path>"):
        say(frontend, "echo", "raise")
    with pytest.raises(ShmserveError, match="bad words are not echoed"):
        say(frontend, "echo", "bad")
    server.wait_log("/etc/echo/rules.py")


def test_custom_http(frontend: Dispatcher) -> None:
    head = RequestHead(
        "POST", "/v1/chat/completions", headers=(("Content-Type", "application/json"),)
    )
    body = b'{"prompt": "a b"}'
    (answer,) = answers(frontend, "chat", http=custom_http.encode(head), http_body=body)
    assert json.loads(answer["http_body"])["words"] == ["a", "b"]
    streaming = {"grps_streaming": True}
    parts = answers(frontend, "chat", streaming, http=custom_http.encode(head), http_body=body)
    assert b"".join(part["http_body"] for part in parts) == b"data: a\n\ndata: b\n\n"
    heads = [custom_http.decode_answer(part["http"]) for part in parts if "http" in part]
    assert heads == [HttpAnswer(200, (("Content-Type", "text/event-stream"),))]


def run_line(frontend: Dispatcher, array: Array) -> tuple[Array, dict[str, Any]]:
    with frontend.call(frontend.ready_model("line")) as call:
        reservation = call.reserve(array.nbytes)
        reservation.view[:] = array.data.cast("B")
        call.add_input("X", "FP32", array.shape, reservation)
        (output,) = call.execute().outputs
        return np.frombuffer(bytes(output.view), np.float32), call.receipt.as_dict()


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_pipeline_copies_nothing(frontend: Dispatcher, size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    for _ in range(3):
        answer, receipt = run_line(frontend, array)
        np.testing.assert_array_equal(answer, (array * 2 + 1) * 2)
        assert receipt["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 0}
        # each model once, even if it ran more often
        assert receipt["executor"] == "scale/1/0, shift/1/0"


def test_a_pipeline_of_messages(frontend: Dispatcher) -> None:
    assert say(frontend, "words", "x") == "1/bax!"
    message = grps_pb2.GrpsMessage(str_data="x y").SerializeToString()
    found = answers(frontend, "words", {"grps_streaming": True}, grps=message)
    assert texts(found) == ["1/bay!", "x!"]
    with pytest.raises(ShmserveError, match="'native' does not lead to 'shift'"):
        say(frontend, "bad", "x")


def test_a_pipeline_over_http(server: RunningServer) -> None:
    status, _, _ = server.request("GET", "/v2/models/line/ready")
    assert status == 200
    status, metadata = server.get("/v2/models/line")
    assert [t["name"] for t in metadata["inputs"]] == ["X"]
    data = np.arange(1 << 16, dtype=np.float32)
    body, receipt = server.infer_binary("line", data, name="X")
    np.testing.assert_array_equal(np.frombuffer(body, np.float32), (data * 2 + 1) * 2)
    assert receipt["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 0}


def predict(server: RunningServer, query: str = "", **document: Any) -> tuple[int, Any]:
    status, _, body = server.request(
        "POST",
        f"/grps/v1/infer/predict{query}",
        json.dumps(document).encode(),
        {"Content-Type": "application/json"},
    )
    return status, body if query else json.loads(body)


def test_grps_clients_reach_projects_workers_and_pipelines(server: RunningServer) -> None:
    server.wait_ready()
    ok = {"code": 200, "msg": "OK", "status": "SUCCESS"}
    for model, text, expected in (
        ("your_model-1.0.0", "hi", "hi!"),  # the name that the project gives
        ("echo-1.0.0", "hi", "hi!"),  # as the worker is called
        ("second-1.0.0", "x", "xb/1"),
        ("chain-1.0.0", "x", "xab/1"),
        ("native-3.0.0", "abc", "cba"),
        ("words", "x", "1/bax!"),
        ("words-1.0.0", "x", "1/bax!"),
    ):
        status, answer = predict(server, model=model, str_data=text)
        assert (status, answer) == (200, {"status": ok, "str_data": expected}), model
    status, answer = predict(server, model="line", ndarray=[1, 2])
    assert answer["gtensors"]["tensors"][0]["flat_float32"] == [6.0, 10.0]
    status, answer = predict(server, model="your_model-1.0.0", str_data="raise")
    assert status == answer["status"]["code"] == 500
    assert answer["status"]["msg"] == "cannot echo this, see <path>"
    status, body = predict(server, "?streaming=true", model="your_model-1.0.0", str_data="a b stop")
    assert status == 200
    decoder = json.JSONDecoder()
    found, at = [], 0
    while at < len(body):
        message, at = decoder.raw_decode(body.decode(), at)
        found.append(message)
    assert [m.get("str_data") for m in found] == ["a!", "b!", None]
    assert found[-1]["status"] == {
        "code": 500,
        "msg": "the stream was stopped",
        "status": "FAILURE",
    }


def test_grps_clients_see_what_pipelines_consist_of(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    for name, inside in (("line", "model: shift"), ("your_model", "inferer_name: your_inferer")):
        body = json.dumps({"str_data": name}).encode()
        status, _, answer = server.request("POST", "/grps/v1/metadata/model", body, headers)
        assert status == 200
        assert inside in json.loads(answer)["str_data"]


def test_own_paths_over_http(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "me"}
    path = "/v1/chat/completions"
    status, _, body = server.request("POST", path, b'{"prompt": "a b"}', headers)
    assert (status, json.loads(body)["words"]) == (200, ["a", "b"])
    status, fields, body = server.request("GET", f"{path}?say=hi", headers=headers)
    assert (status, body, fields["x-agent"]) == (203, b"hi", "me")
    ask = b'{"prompt": "a b", "stream": true}'
    status, fields, body = server.request("POST", path, ask, headers)
    assert (status, body) == (200, b"data: a\n\ndata: b\n\n")
    assert fields["content-type"].startswith("text/event-stream")
    status, _, body = server.request("POST", path, b'{"fail": true}', headers)
    assert status == 500
    assert b"Traceback" not in body
    status, _, body = server.request("POST", "/talk", b"a b", {"Content-Type": "text/plain"})
    assert (status, body) == (200, b"a b;")


def test_values_of_a_projects_own_are_shown(frontend: Dispatcher, server: RunningServer) -> None:
    say(frontend, "echo", "hi")
    rows: list[dict[str, Any]] = []

    def told() -> bool:
        rows[:] = server.show("monitor")
        return all("name" in row for row in rows) and bool(rows)

    wait_until(told, "all answers in time")
    (row,) = rows
    assert (row["instance"], row["name"], row["kind"]) == ("echo/1/0", "echoed", "inc")
    assert row["total"] >= 1


def busy(frontend: Dispatcher, instance: str, requests: int = 1) -> bool:
    peers = list(frontend.executors.pools.values())
    return sum(p.in_flight for p in peers if p.instance.name == instance) >= requests


@pytest.mark.parametrize("victim", ["shift/1/0", "scale/1/0"])
def test_an_executor_that_is_killed_in_the_middle_of_a_pipeline(
    frontend: Dispatcher, server: RunningServer, threads: ThreadPoolExecutor, victim: str
) -> None:
    # which ends as soon as the executor is killed
    value = -1.5 if victim == "scale/1/0" else -10.0

    # the first model doubles the value, the second model sleeps
    asked = threads.submit(run_line, frontend, np.full(5000, value, np.float32))
    wait_until(lambda: busy(frontend, "shift/1/0"), "the second model has not begun")
    kill_executor(server, victim)
    error = asked.exception()
    if isinstance(error, Unavailable | WorkLost):
        assert f"'{victim.split('/')[0]}'" in error.message
    else:  # the first model had finished and was available for the last step
        assert (victim, asked.result()[0][0]) == ("scale/1/0", -4)
    server.wait_instances()
    wait_until(lambda: frontend.snapshot().ready, "the models are not back")
    answer, _ = run_line(frontend, np.ones(10, np.float32))
    assert (answer == 6).all()


def test_a_project_that_is_killed_in_the_middle_comes_back(
    frontend: Dispatcher, server: RunningServer, threads: ThreadPoolExecutor
) -> None:
    asked = [threads.submit(say, frontend, "echo", "sleep 30") for _ in range(3)]
    wait_until(lambda: busy(frontend, "echo/1/0", 3), "the requests have not begun")
    kill_executor(server, "echo/1/0")
    assert [type(one.exception()) for one in asked] == [ExecutorLost] * 3
    server.wait_instances()
    wait_until(lambda: frontend.snapshot().ready, "the project is not back")
    assert say(frontend, "echo", "hi") == "hi!"
