"""Ensembles in a real server: data between steps, answers to clients, effects of a death."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.core.control.rollout import LINGER_S
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.errors import Cancelled, DeadlineExceeded, ExecutorLost, ShmserveError
from tests.holding import kill_executor, replace, statistics
from tests.integration.region_client import Client, Memory
from tests.running_server import wait_until
from tests.servers import SMALL, Server, triton

Array = np.ndarray[Any, Any]
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}
VECTOR = "data_type: TYPE_FP32 dims: [ -1 ]"
ONE_TO_ONE = f'backend: "python" input {{ name: "X" {VECTOR} }} output {{ name: "Y" {VECTOR} }}'
SCALE = """
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        if x.size and x[0] < -1000:
            raise ValueError("too cold")
        np.multiply(x, 2, out=request.output("Y", x.shape))
"""
# Each instance waits until the other has begun, or for ever if there is no other instance
MEETS = """
import os
import time
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        place = f"{FOLDER!r}/{int(x[0])}-"
        open(place + "MINE", "w").close()
        end = time.monotonic() + 30
        while not os.path.exists(place + "OTHERS") and not request.cancelled:
            assert time.monotonic() < end, "the other branch never ran"
            time.sleep(0.002)
        np.add(x, NUMBER, out=request.output("Y", x.shape))
"""
ADD = """
import numpy as np

class Model:
    def infer(self, request):
        a, b = request.input("A"), request.input("B")
        np.add(a, b, out=request.output("S", a.shape))
        if "D" in request.requested:
            np.subtract(a, b, out=request.output("D", a.shape))
"""
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            sender = request.get_response_sender()
            for number in range(int(x[0])):
                y = pb_utils.Tensor("Y", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([y]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            asked = pb_utils.InferenceRequest(
                model_name="parts",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", x)],
            )
            parts = [
                pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
                for response in asked.exec(decoupled=True)
                if response.output_tensors()
            ]
            y = pb_utils.Tensor("Y", np.concatenate(parts))
            answers.append(pb_utils.InferenceResponse([y]))
        return answers
"""


def tensors(kind: str, *names: str) -> str:
    return " ".join(f'{kind} {{ name: "{name}" {VECTOR} }}' for name in names)


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs.items()]
    maps += [f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(inputs: str, outputs: str, *steps: str) -> str:
    scheduling = f"ensemble_scheduling {{ {' '.join(steps)} }}"
    return (
        f'platform: "ensemble" {tensors("input", *inputs.split())} '
        f"{tensors('output', *outputs.split())} {scheduling}"
    )


def write(folder: Path, name: str, configuration: str, code: str = "") -> None:
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    (folder / name / "config.pbtxt").write_text(configuration)
    if code:
        (folder / name / "1" / "model.py").write_text(code)


CHAIN = ensemble(
    "IN", "OUT",
    step("scale", {"X": "b"}, {"Y": "OUT"}),
    step("scale", {"X": "IN"}, {"Y": "a"}),
    step("scale", {"X": "a"}, {"Y": "b"}),
)  # fmt: skip
DIAMOND = ensemble(
    "IN", "SUM DIFFERENCE DOUBLE",
    step("scale", {"X": "IN"}, {"Y": "DOUBLE"}),
    step("left", {"X": "DOUBLE"}, {"Y": "l"}),
    step("right", {"X": "DOUBLE"}, {"Y": "r"}),
    step("add", {"A": "l", "B": "r"}, {"S": "SUM", "D": "DIFFERENCE"}),
)  # fmt: skip


def write_models(folder: Path) -> None:
    write(folder, "scale", ONE_TO_ONE, SCALE)
    for name, other, number in (("left", "right", "1"), ("right", "left", "10")):
        code = MEETS.replace("MINE", name).replace("OTHERS", other).replace("NUMBER", number)
        write(folder, name, ONE_TO_ONE, code.replace("FOLDER!r", f"'{folder.parent}'"))
    both = f'backend: "python" {tensors("input", "A", "B")} {tensors("output", "S", "D")}'
    write(folder, "add", both, ADD)
    decoupled = " model_transaction_policy { decoupled: true }"
    write(folder, "counts", ONE_TO_ONE + decoupled, COUNTS)
    write(folder, "chain", CHAIN)
    write(folder, "diamond", DIAMOND)
    inner = (step("chain", {"IN": "IN"}, {"OUT": "c"}), step("scale", {"X": "c"}, {"Y": "OUT"}))
    write(folder, "nested", ensemble("IN", "OUT", *inner))
    alone = (step("scale", {"X": "IN"}, {"Y": "x"}), step("left", {"X": "x"}, {"Y": "OUT"}))
    write(folder, "alone", ensemble("IN", "OUT", *alone))
    late = (step("left", {"X": "IN"}, {"Y": "x"}), step("chain", {"IN": "x"}, {"OUT": "OUT"}))
    write(folder, "late", ensemble("IN", "OUT", *late))
    told = (step("scale", {"X": "IN"}, {"Y": "x"}), step("counts", {"X": "x"}, {"Y": "OUT"}))
    write(folder, "told", ensemble("IN", "OUT", *told))
    # Emits 0, 1, … up to the requested count. Each number is doubled, then the count is added.
    parts = (
        step("counts", {"X": "IN"}, {"Y": "part"}),
        step("scale", {"X": "part"}, {"Y": "twice"}),
        step("add", {"A": "twice", "B": "IN"}, {"S": "OUT", "D": "unused"}),
    )
    write(folder, "parts", ensemble("IN", "OUT", *parts))
    waits = (step("counts", {"X": "IN"}, {"Y": "part"}), step("left", {"X": "part"}, {"Y": "OUT"}))
    write(folder, "parted", ensemble("IN", "OUT", *waits))
    write(folder, "caller", ONE_TO_ONE, CALLER)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ensembles") / "models"
    write_models(folder)
    loaded = "diamond,nested,alone,told,parts,parted,caller"
    with Server(
        folder, model_control="explicit", arena_bytes=4 << 20, load_models=loaded, http_workers=1
    ) as running:
        yield running


def run(
    frontend: Dispatcher, model: str, array: Array, **options: Any
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Outputs and the receipt."""
    call = frontend.call(frontend.ready_model(model), RunOptions(**options))
    with call:
        feed(call, array)
        outputs = {
            output.name: np.frombuffer(bytes(output.view), np.float32)
            for output in call.execute().outputs
        }
        return outputs, call.receipt.as_dict()


def feed(call: Any, array: Array) -> None:
    reservation = call.reserve(array.nbytes)
    reservation.view[:] = array.data.cast("B")
    call.add_input("IN", "FP32", array.shape, reservation)


def test_three_steps_of_16_mib_copy_nothing(frontend: Dispatcher) -> None:
    array = np.arange(4 << 20, dtype=np.float32)
    for model, times in (("chain", 8), ("nested", 16)):
        outputs, receipt = run(frontend, model, array)
        np.testing.assert_array_equal(outputs["OUT"], array * times)
        assert receipt["copied_bytes"] == NOTHING


def test_branches_of_a_diamond_run_at_once(frontend: Dispatcher) -> None:
    outputs, receipt = run(frontend, "diamond", np.full(5000, 3, np.float32))
    assert list(outputs) == ["SUM", "DIFFERENCE", "DOUBLE"]
    assert (outputs["SUM"] == 23).all()
    assert (outputs["DIFFERENCE"] == -9).all()
    assert (outputs["DOUBLE"] == 6).all()
    assert receipt["copied_bytes"] == NOTHING
    outputs, _ = run(frontend, "diamond", np.full(10, 3, np.float32), outputs=("DOUBLE", "SUM"))
    assert list(outputs) == ["DOUBLE", "SUM"]


def test_statistics_have_the_times_of_the_steps(frontend: Dispatcher, server: Server) -> None:
    before = statistics(server, "chain")
    run(frontend, "chain", np.zeros(5000, np.float32))
    after = statistics(server, "chain")
    for field in ("inference_count", "execution_count"):
        assert after[field] == before[field] + 1
    (batch,) = after["batch_stats"]
    assert batch["batch_size"] == 1
    for stage in ("compute_input", "compute_infer", "compute_output"):
        assert batch[stage] == after["inference_stats"][stage]
        assert batch[stage]["ns"] > before["inference_stats"][stage]["ns"]
    assert after["last_inference"] > before["last_inference"]


def test_an_error_names_the_step(frontend: Dispatcher, server: Server) -> None:
    with pytest.raises(
        ShmserveError, match=r"^in ensemble 'chain', .*too cold.* \(step 'scale'\)$"
    ):
        run(frontend, "chain", np.full(10, -600, np.float32))
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [-600]}
    status, answer = server.infer("chain", {"inputs": [tensor]})
    assert status == 500
    assert answer["error"].startswith("in ensemble 'chain', ")
    assert answer["error"].endswith(" (step 'scale')")


def test_a_deadline_and_a_cancellation_end_the_step_that_runs(frontend: Dispatcher) -> None:
    array = np.full(5000, 4000, np.float32)
    with pytest.raises(DeadlineExceeded, match=r"^in ensemble 'alone', .* \(step 'left'\)$"):
        run(frontend, "alone", array, timeout_s=2)
    call = frontend.call(frontend.ready_model("alone"), RunOptions(), True)
    with call:
        feed(call, array)
        threading.Timer(0.3, call.cancel).start()
        with pytest.raises(Cancelled):
            call.execute()


def test_the_last_step_may_stream(frontend: Dispatcher, server: Server) -> None:
    with frontend.call(frontend.ready_model("told")) as call:
        feed(call, np.full(1, 2, np.float32))
        found = [
            float(np.frombuffer(output.view, np.float32)[0])
            for outcome in call.stream()
            for output in outcome.outputs
        ]
    assert found == [0, 1, 2, 3]
    _, document = server.get("/v2/models/told/config")
    assert document["model_transaction_policy"] == {"decoupled": True}


def test_a_stream_through_other_steps(frontend: Dispatcher, server: Server) -> None:
    with frontend.call(frontend.ready_model("parts")) as call:
        feed(call, np.full(1, 40, np.float32))
        found = [
            float(np.frombuffer(output.view, np.float32)[0])
            for outcome in call.stream()
            for output in outcome.outputs
        ]
        assert call.receipt.as_dict()["copied_bytes"] == {**NOTHING, "out": 40 * 4}  # of `counts`
    assert found == [2 * number + 40 for number in range(40)]
    _, _, body = server.request("POST", "/v2/models/parts/generate_stream", b'{"IN": 3}')
    answers = [json.loads(line[6:]) for line in body.decode().splitlines() if line]
    assert [answer["OUT"] for answer in answers] == [3, 5, 7]
    assert {answer["model_name"] for answer in answers} == {"parts"}
    tensor = {"name": "X", "datatype": "FP32", "shape": [1], "data": [3]}
    status, answer = server.infer("caller", {"inputs": [tensor]})
    assert (status, answer["outputs"][0]["data"]) == (200, [3, 5, 7])


def kill_left_at_work(frontend: Dispatcher, server: Server) -> None:
    pools = frontend.executors.pools
    wait_until(
        lambda: any(p.in_flight for p in list(pools.values()) if p.instance.name == "left/1/0"),
        "the second step has not begun",
    )
    kill_executor(server, "left/1/0")


def test_a_step_whose_executor_is_killed(frontend: Dispatcher, server: Server) -> None:
    errors: list[ShmserveError] = []

    def work() -> None:
        try:
            run(frontend, "alone", np.full(5000, 5000, np.float32))
        except ShmserveError as ex:
            errors.append(ex)

    thread = threading.Thread(target=work)
    thread.start()
    kill_left_at_work(frontend, server)
    thread.join()
    (error,) = errors
    assert isinstance(error, ExecutorLost)
    assert "in ensemble 'alone', the executor of model 'left' died" in error.message
    server.wait_instances()
    # In the midst of a stream: all slots in use come back
    call = frontend.call(frontend.ready_model("parted"))
    with call:
        feed(call, np.full(1, 6000, np.float32))
        answers = call.stream()
        killer = threading.Thread(target=kill_left_at_work, args=(frontend, server))
        killer.start()
        with pytest.raises(ExecutorLost, match=r"the executor of model 'left' died.*step 'left'"):
            next(answers)
        killer.join()
    server.wait_instances()
    wait_until(lambda: frontend.snapshot().ready, "the models are not back")
    outputs, _ = run(frontend, "diamond", np.full(10, 50, np.float32))
    assert (outputs["SUM"] == 211).all()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(server: Server, protocol: str) -> None:
    triton("ensemble", protocol, server.address(protocol))


def test_memory_of_clients_at_both_ends(server: Server) -> None:
    client = Client(server.http_port)
    size = 1 << 20
    with Memory(size) as source, Memory(2 * size) as target:
        values = np.full(size // 4, 80, np.float32)
        source.put(values)
        assert client.register("in", source.name, size)[0] == 200
        assert client.register("out", target.name, 2 * size)[0] == 200
        window = {"shared_memory_region": "out", "shared_memory_byte_size": size}
        places = [
            {"name": "SUM", "parameters": window},
            {"name": "DOUBLE", "parameters": {**window, "shared_memory_offset": size}},
        ]
        given = {"shared_memory_region": "in", "shared_memory_byte_size": size}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [values.size], "parameters": given}
        status, headers, body = server.request(
            "POST",
            "/v2/models/diamond/infer",
            json.dumps({"inputs": [tensor], "outputs": places}).encode(),
            {"shmserve-receipt": "1"},
        )
        assert status == 200, body
        assert json.loads(headers["shmserve-receipt"])["copied_bytes"] == NOTHING
        np.testing.assert_array_equal(target.get(values.size), values * 4 + 11)
        np.testing.assert_array_equal(target.get(values.size, size), values * 2)
    assert client.unregister()[0] == 200
    client.close()


def index(server: Server) -> dict[str, tuple[str, str]]:
    """Name -> state and reason."""
    return {row["name"]: (row.get("state", ""), row.get("reason", "")) for row in server.index()}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """Server with nothing loaded, and the folder of its repository."""
    folder = tmp_path / "models"
    write_models(folder)
    with Server(folder, model_control="explicit", **SMALL) as running:
        yield running, folder


def test_loading_an_ensemble_loads_what_it_consists_of(own: tuple[Server, Path]) -> None:
    server, folder = own
    assert server.control("load", "scale")[0] == 200
    assert server.control("load", "nested")[0] == 200
    names = {name for name, (state, _) in index(server).items() if state == "READY"}
    assert names == {"scale", "chain", "nested"}
    # The ensemble becomes unusable without its models, and usable again with them
    assert server.control("unload", "scale")[0] == 200
    assert index(server)["nested"][0] == "UNAVAILABLE"
    assert "depends on 'scale', which is not ready" in index(server)["chain"][1]
    assert server.control("load", "scale")[0] == 200
    assert index(server)["nested"][0] == "READY"
    # A configuration that does not fit replaces nothing
    chain = (folder / "chain/config.pbtxt").read_text()
    (folder / "chain/config.pbtxt").write_text(chain.replace("FP32", "INT8"))
    status, told = server.control("load", "chain")
    assert status == 400
    assert "load failed for model 'chain'" in told["error"]
    assert "is INT8" in told["error"]
    assert index(server)["nested"][0] == "READY"
    write(folder, "chain", CHAIN.replace('"a"', '"c"', 1))
    status, told = server.control("load", "chain")
    assert (status, "takes tensor 'a'" in told["error"]) == (400, True)
    # In a circle
    circle = (
        step("second", {"IN": "IN"}, {"OUT": "OUT"}),
        step("first", {"IN": "IN"}, {"OUT": "OUT"}),
    )
    for name, one in zip(("first", "second"), circle, strict=True):
        write(folder, name, ensemble("IN", "OUT", one))
    status, told = server.control("load", "first")
    assert status == 400
    assert "depends on 'second'" in told["error"]
    # A model that was loaded only for the ensemble is unloaded with it, even by a new coordinator.
    # A model that a client has loaded stays.
    replace(server, "coordinator")
    assert index(server)["nested"][0] == "READY"
    assert server.control("unload", "nested", unload_dependents=True)[0] == 200
    states = {name: state for name, (state, _) in index(server).items()}
    assert (states["nested"], states["chain"]) == ("UNAVAILABLE", "UNAVAILABLE")
    assert states["scale"] == "READY"
    assert server.infer("nested", {"inputs": []})[0] == 404


@pytest.mark.parametrize("dependents", [False, True])
def test_a_run_under_way_ends_although_its_steps_are_unloaded(
    own: tuple[Server, Path], dependents: bool
) -> None:
    server, folder = own
    assert server.control("load", "late")[0] == 200
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [7]}
    with ThreadPoolExecutor() as threads:
        run = threads.submit(server.infer, "late", {"inputs": [tensor]})
        wait_until((folder.parent / "7-left").exists, "the first step does not run")
        unloaded = "late" if dependents else "scale"
        assert server.control("unload", unloaded, unload_dependents=dependents)[0] == 200
        wait_until(lambda: index(server)["scale"][0] != "READY", "it is not unloaded")
        assert server.infer("late", {"inputs": [tensor]})[0] == 404
        time.sleep(3 * LINGER_S)  # the executor would have left by now
        (folder.parent / "7-right").touch()
        status, answer = run.result()
    assert (status, answer["outputs"][0]["data"]) == (200, [(7 + 1) * 8])
    remaining = 0 if dependents else 1
    wait_until(lambda: len(server.pids("executor")) == remaining, "an executor does not leave")
