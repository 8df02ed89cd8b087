"""Batches in a real server: which requests share a batch, refusals, and the effects of a death."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.cli.operating import show
from tests.grpc_client import Client
from tests.holding import Hold, in_flight, metric, statistics
from tests.integration.region_client import Client as RegionClient
from tests.integration.region_client import Memory
from tests.running_server import wait_until
from tests.servers import Server
from tests.unit.executor.test_onnx_backend import adder, save, value

MODELS = Path(__file__).parents[1] / "repositories" / "batching"
POOL = 8
OUT: dict[str, Any] = {"name": "OUT"}
ROWS: dict[str, Any] = {"name": "ROWS"}
helper, T = onnx.helper, onnx.TensorProto


def write_ragged(folder: Path) -> None:
    """Write a model that doubles its input and reports each request's length in a ragged batch."""
    inputs = [value("X", T.FLOAT, ["N"]), value("T", T.FLOAT, ["B"])]
    outputs = [value("Y", T.FLOAT, ["N"]), value("COUNT", T.FLOAT, ["B", 1])]
    nodes = [
        helper.make_node("Add", ["X", "X"], ["Y"]),
        helper.make_node("Unsqueeze", ["T", "axis"], ["COUNT"]),
    ]
    axis = helper.make_tensor("axis", T.INT64, [1], [1])
    config = """backend: "onnxruntime" max_batch_size: 8
        input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
                 { name: "COUNT" data_type: TYPE_FP32 dims: [ 1 ] } ]
        batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "T" data_type: TYPE_FP32
                        source_input: "X" } ]
        batch_output [ { target_name: "Y" source_input: "X" } ]
        dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 30000000 }"""
    save(folder, nodes, inputs, outputs, constants=[axis], config=config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(MODELS, models, dirs_exist_ok=True)
    config = (
        'backend: "onnxruntime" max_batch_size: 8 '
        "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 200000 }"
    )
    a, b, y = (value(name, T.FLOAT, ["N", "M"]) for name in "ABY")
    node = helper.make_node("Add", ["A", "B"], ["Y"])
    save(models / "sum", [node], [a, b], [y], config=config)
    adder(models / "bare", ["N", 3], config="")
    write_ragged(models / "ragged")
    shutil.copytree(models / "native", models / "parts")
    config = (models / "native" / "config.pbtxt").read_text()
    (models / "parts" / "config.pbtxt").write_text(config.replace(": 200000 ", ": 30000000 "))
    shutil.copytree(models / "meeting", models / "twins")
    twice = (
        'instance_group [ { count: 2 } ] parameters { key: "rerun" value { string_value: "true" } }'
    )
    config = (models / "meeting" / "config.pbtxt").read_text()
    (models / "twins" / "config.pbtxt").write_text(config + twice)
    with Server(models, http_workers=1, grpc_processes=1, metrics_triton_names="true") as server:
        yield server


def ask(
    server: Server, model: str, command: str, **parameters: int
) -> tuple[int, dict[str, str], Any]:
    tensor = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": [command]}
    body = json.dumps({"id": "7", "inputs": [tensor], "parameters": parameters}).encode()
    status, headers, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, headers, json.loads(answer)


def size_of(answer: tuple[int, dict[str, str], Any]) -> int:
    status, _, document = answer
    assert status == 200, document
    size: int = document["outputs"][0]["data"][0]
    return size


def waiting(server: Server, model: str, count: int) -> None:
    wait_until(lambda: in_flight(server, f"{model}/1/0") == count, f"not {count} are there")


def test_a_batch_size_that_nobody_has_set_is_told(server: Server) -> None:
    notes = {row["model"]: row["note"] for row in show.ask(server.run_dir, "models")}
    assert notes["bare"].startswith("max_batch_size 4 is the default for models whose")
    assert notes["sum"] == notes["meeting"] == ""
    server.wait_log(f"configuration: {notes['bare']}")


def test_a_python_model_gets_the_requests_of_a_batch_as_a_list(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    before = statistics(server, "meeting")
    futures = [threads.submit(ask, server, "meeting", "") for _ in range(4)]
    assert [size_of(future.result()) for future in futures] == [4] * 4
    after = statistics(server, "meeting")
    assert after["inference_count"] - before["inference_count"] == 4
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_stats"]["success"]["count"] == 4
    assert [row["batch_size"] for row in after["batch_stats"]] == [4]
    assert after["batch_stats"][0]["compute_infer"]["count"] == 1


def test_who_waits_for_a_batch_is_pending(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    def pending() -> float:
        return metric(server, "nv_inference_pending_request_count", "model=meeting", "version=1")

    with Hold(tmp_path) as hold:
        running = threads.submit(ask, server, "meeting", f"hold:{hold.path}")
        hold.wait_begun()
        others = [threads.submit(ask, server, "meeting", "") for _ in range(3)]
        wait_until(lambda: pending() == 3, "three do not wait")
        hold.let_go()
        assert [size_of(future.result()) for future in (running, *others)] == [1, 3, 3, 3]
    wait_until(lambda: pending() == 0, "something waits")


def test_an_error_of_one_response_is_that_requests_only(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    futures = [threads.submit(ask, server, "meeting", c) for c in ("", "fail", "", "")]
    status, _, document = futures[1].result()
    assert (status, document["error"]) == (500, "as it was told")
    assert [size_of(futures[index].result()) for index in (0, 2, 3)] == [4] * 3


@pytest.mark.parametrize("width", [3, 20_000])
@pytest.mark.parametrize("model", ["sum", "native"])
def test_one_tensor_for_all_gives_everybody_their_own_rows(
    server: Server, threads: ThreadPoolExecutor, model: str, width: int
) -> None:
    names = ["A", "B"] if model == "sum" else ["IN"]

    def infer(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        random = np.random.default_rng(number)
        arrays = [random.random((1 + number % 2, width), np.float32) for _ in names]
        message = pb.ModelInferRequest(model_name=model)
        for name, array in zip(names, arrays, strict=True):
            message.inputs.add(name=name, datatype="FP32", shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        answer = client.call("ModelInfer", message)
        got = np.frombuffer(answer.raw_output_contents[0], np.float32)
        expected = arrays[0] + (arrays[1] if model == "sum" else np.float32(1))
        return got.reshape(answer.outputs[0].shape), expected

    before = statistics(server, model)
    client = Client(server.grpc_address)
    try:
        for got, expected in threads.map(infer, range(40)):
            np.testing.assert_array_equal(got, expected)
    finally:
        client.close()
    after = statistics(server, model)
    assert after["inference_count"] - before["inference_count"] == 60
    assert after["execution_count"] - before["execution_count"] < 40
    assert max(row["batch_size"] for row in after["batch_stats"]) > 2


def test_requests_for_different_outputs_are_one_batch(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    """Requests for one output, a class, an output in client memory, or all outputs meet."""

    def send(number: int, *outputs: dict[str, Any]) -> list[Any]:
        data = [number, number + 1]
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": data}
        document = {"inputs": [tensor], **({"outputs": outputs} if outputs else {})}
        status, answer = server.infer("parts", document)
        assert status == 200, answer
        return [(output["name"], output.get("data")) for output in answer["outputs"]]

    best = {"name": "OUT", "parameters": {"classification": 1}}
    client = RegionClient(server.http_port)
    with Memory(4096) as memory:
        assert client.register("parts", memory.name, 4096)[0] == 200
        place = {"shared_memory_region": "parts", "shared_memory_byte_size": 8}
        wanted = [(ROWS,), (OUT,), (best,), ({**OUT, "parameters": place}, ROWS)]
        futures = [threads.submit(send, n, *wanted[n % 5 - 1] if n % 5 else ()) for n in range(8)]
        answers = [future.result() for future in futures]
        assert memory.get(2).tolist() == [5, 6]
        assert client.unregister()[0] == 200
    client.close()
    rows = ("ROWS", [8])
    expected = [[("OUT", [n + 1, n + 2]), rows] for n in (0, 5)]
    assert [answers[0], answers[5]] == expected
    assert (answers[1], answers[6]) == ([rows], [rows])
    assert (answers[2], answers[7]) == ([("OUT", [3, 4])], [("OUT", [8, 9])])
    assert answers[3] == [("OUT", ["5.000000:1"])]
    assert answers[4] == [("OUT", None), rows]


def test_requests_of_different_shapes_are_one_flat_batch(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    def send(width: int) -> dict[str, list[float]]:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, width], "data": [width] * width}
        status, document = server.infer("ragged", {"inputs": [tensor]})
        assert status == 200, document
        outputs = {output["name"]: output for output in document["outputs"]}
        assert (outputs["Y"]["shape"], outputs["COUNT"]["shape"]) == ([1, width], [1, 1])
        return {name: output["data"] for name, output in outputs.items()}

    answers = list(threads.map(send, (5, 1, 3)))
    assert answers == [{"Y": [2 * n] * n, "COUNT": [n]} for n in (5, 1, 3)]
    stats = statistics(server, "ragged")
    assert (stats["inference_count"], stats["execution_count"]) == (3, 1)
    status, config = server.get("/v2/models/ragged/config")
    assert status == 200
    assert [each["name"] for each in config["input"]] == ["X"]
    assert config["batch_input"][0]["kind"] == "BATCH_ELEMENT_COUNT"


def test_a_full_queue_and_a_timeout_are_told_at_once(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Hold(tmp_path) as hold:
        held: list[Future[Any]] = [threads.submit(ask, server, "strict", f"hold:{hold.path}")]
        hold.wait_begun()
        held.append(threads.submit(ask, server, "strict", ""))
        waiting(server, "strict", 2)
        status, headers, document = ask(server, "strict", "", timeout=1000)
        assert (status, headers["retry-after"]) == (503, "1")
        assert document["error"] == "Request timeout expired"
        held.append(threads.submit(ask, server, "strict", ""))
        waiting(server, "strict", 3)
        status, headers, document = ask(server, "strict", "")
        assert (status, headers["retry-after"]) == (503, "1")
        assert document["error"] == "[request id: 7] Exceeds maximum queue size"
        client = Client(server.grpc_address)
        message = pb.ModelInferRequest(model_name="strict")
        message.inputs.add(name="COMMAND", datatype="BYTES", shape=[1, 1])
        message.raw_input_contents.append(bytes(4))
        with pytest.raises(grpc.RpcError) as caught:
            client.call("ModelInfer", message)
        client.close()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [size_of(future.result()) for future in held] == [1, 2, 2]
    stats = statistics(server, "strict")
    assert stats["inference_stats"]["success"]["count"] == 3
    assert stats["inference_stats"]["fail"]["count"] == 3
    assert (stats["inference_count"], stats["execution_count"]) == (3, 2)
    refused = "shmserve_request_failures_total", "model=strict", "reason=queue_full"
    assert metric(server, *refused) == 3


def test_a_death_inside_a_batch_is_told_to_everybody_in_it(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    futures = [threads.submit(ask, server, "meeting", c) for c in ("", "", "leave", "")]
    answers = [future.result() for future in futures]
    assert [status for status, _, _ in answers] == [502] * 4
    assert {document["error"] for _, _, document in answers} == {
        "the executor of model 'meeting' died while it had the request; it is being restarted"
    }
    server.wait_instances()
    futures = [threads.submit(ask, server, "meeting", "") for _ in range(4)]
    assert [size_of(future.result()) for future in futures] == [4] * 4
    wait_until(lambda: not server.show("slots"), "slots are not given back")


@pytest.mark.parametrize("model", ["meeting", "twins"])
def test_kill_9_in_the_midst_of_a_batch(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path, model: str
) -> None:
    """The batch holds requests of several clients, and more requests are queued. Where the model
    allows retries, all run again."""
    server.wait_instances()
    with Hold(tmp_path) as hold:
        futures = [threads.submit(ask, server, model, f"hold:{hold.path}") for _ in range(POOL)]
        hold.wait_begun()
        instances = [f"{model}/1/{index}" for index in range(2 if model == "twins" else 1)]
        wait_until(
            lambda: sum(in_flight(server, name) for name in instances) == POOL,
            "not all requests have come",
        )
        (victim, *_) = server.pids(f"executor {instances[0]}")
        os.kill(victim, signal.SIGKILL)
        if model == "twins":  # the other instance or the next process runs them again
            wait_until(
                lambda: (
                    victim not in server.pids(f"executor {instances[0]}")
                    and sum(in_flight(server, name) for name in instances) == POOL
                ),
                "they do not run again",
            )
        hold.let_go()
        answers = [future.result() for future in futures]
    if model == "twins":
        assert all(1 <= size_of(answer) <= 4 for answer in answers)
    else:
        assert [status for status, _, _ in answers] == [502] * POOL
        assert {document["error"] for _, _, document in answers} == {
            "the executor of model 'meeting' died while it had the request; it is being restarted"
        }
    server.wait_instances()
    futures = [threads.submit(ask, server, model, "") for _ in range(4)]
    assert {status for status, _, _ in (future.result() for future in futures)} == {200}
    wait_until(lambda: not server.show("slots"), "slots are not given back")
