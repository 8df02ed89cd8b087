"""Models that call other models, in a real server: Triton's dialect, as documented, and ours."""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.holding import metric
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only, triton

MODELS = Path(__file__).parents[1] / "repositories" / "calls"
MIB16 = 16 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODELS, **only("*"), **SMALL) as server:
        yield server
        wait_until(lambda: held(server) == [], "slots come back")


def held(server: Server) -> list[dict[str, Any]]:
    return [row for row in server.show("slots") if row["state"] != "FREE"]


def tensor(name: str, datatype: str, *data: object) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": list(data)}


def bls(server: Server, command: str) -> Any:
    """Send a command to the model `bls` and return its answer."""
    document = {"inputs": [tensor("COMMAND", "BYTES", command)], "outputs": [{"name": "TEXT"}]}
    status, answer = server.infer("bls", document)
    assert status == 200, answer
    return json.loads(answer["outputs"][0]["data"][0])


def bls_stream(server: Server, command: str) -> str:
    status, answer = server.post("/v2/models/bls_stream/generate", {"COMMAND": command})
    assert status == 200, answer
    return str(answer["TEXT"])


def caller(server: Server, **parameters: str) -> tuple[int, Any]:
    document = {"inputs": [tensor("X", "FP32", 1, 2, 3)], "parameters": parameters}
    status, answer = server.infer("caller", document)
    return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]


def requests_of(server: Server, model: str) -> int:
    """Return the number of requests for a model that came from models."""
    return int(metric(server, "shmserve_requests_total", f"model={model}", "protocol=model"))


def test_a_response_is_memory_of_the_called_model(server: Server) -> None:
    before = requests_of(server, "worker")
    assert bls(server, "view") == [[1, 2, 3, 4], False, False]
    assert requests_of(server, "worker") == before + 1


def test_calls_that_are_awaited_together(server: Server) -> None:
    assert bls(server, "gather 20") == list(range(1, 21))
    assert bls_stream(server, "sum 20") == str(float(sum(range(1, 21))))


def test_responses_of_decoupled_models(server: Server) -> None:
    assert bls(server, "count 40") == list(range(40))
    assert bls(server, "count -2") == [0, 1, "the counter has lost count"]
    assert bls(server, "leave 100000") == 0
    assert bls_stream(server, "count 3") == "[0, 1, 2]"


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ('worker {"do": "fail"}', 1, "the worker did not like it"),
        ("nobody", 2, "Request for unknown model: 'nobody' is not found"),
        ("nobody", 2, "the inference request. Model 'nobody' is not ready."),
        ("counter", 5, "decoupled"),
        ("bls_stream", 5, "decoupled"),
    ],
)
def test_errors_are_those_of_responses(server: Server, call: str, code: int, text: str) -> None:
    got_code, got_text = bls(server, f"error {call}")
    assert got_code == code
    assert text in got_text


def test_what_is_ready(server: Server) -> None:
    assert bls(server, "ready worker")
    assert bls(server, "ready worker 1")
    assert not bls(server, "ready worker 2")
    assert not bls(server, "ready nobody")


def test_a_model_loads_another_and_calls_it(server: Server) -> None:
    assert bls(server, "manage made") == [True, [0, 2, 4, 6], False]
    assert bls(server, "manage ../made").startswith("invalid model name")


def test_a_circle_is_told_at_once(server: Server) -> None:
    text = "all its instances wait for this very call"
    assert text in bls(server, "circle")
    status, error = caller(server, model="caller")
    assert (status, text in error, "(caller -> caller)" in error) == (503, True, True)


def test_native_models_call_others(server: Server) -> None:
    assert caller(server, model="worker") == (200, [2, 3, 4])
    assert caller(server, model="counter") == (200, [0, 1, 2])
    assert caller(server, model="bls") == (200, [1, 2, 3])  # which calls the worker
    assert caller(server, model="worker", do="fail") == (500, "the worker did not like it")


def infer_large(server: Server, command: str) -> tuple[np.ndarray, Any]:
    """Send 16 MiB through `bls` to the worker and back; return the output and the receipt."""
    x = np.arange(MIB16 // 4, dtype=np.float32)
    answer, receipt = server.infer_binary("bls", x, tensor("COMMAND", "BYTES", command), name="X")
    y = np.frombuffer(answer, np.float32)
    assert (y == x + 1).all()
    return y, receipt


def copied(server: Server, model: str) -> dict[str, int]:
    """Return the bytes that requests for a model have copied, by stage."""
    name, of = "shmserve_copied_bytes_total", f"model={model}"
    return {
        s: int(metric(server, name, of, f"stage={s}")) for s in ("in", "batch", "out", "device")
    }


def test_large_tensors_are_copied_once_into_a_call_and_never_out_of_it(server: Server) -> None:
    infer_large(server, "call")
    before = copied(server, "worker")
    _, receipt = infer_large(server, "call")
    after = copied(server, "worker")
    assert {
        stage: after[stage] - before[stage] for stage in after if after[stage] != before[stage]
    } == {"in": MIB16}
    # the output is copied once: a model cannot forward memory of another executor
    assert receipt["copied_bytes"]["out"] == MIB16


def test_a_response_that_is_kept_stays_what_it_was(server: Server) -> None:
    def sizes() -> list[int]:
        return [row["bytes"] for row in held(server)]

    infer_large(server, "call keep")
    wait_until(lambda: sizes() == [MIB16], "only what is kept stays")
    for _ in range(3):
        infer_large(server, "call")
    wait_until(lambda: sizes() == [MIB16], "only what is kept stays")
    assert bls(server, "forget") == 1
    wait_until(lambda: sizes() == [], "it comes back")


def test_a_call_is_cancelled_with_the_request_it_is_for(server: Server) -> None:
    for model, command in ("bls", 'error worker {"do": "wait"}'), ("bls_stream", "hold"):
        body = json.dumps({"COMMAND": command}).encode()
        path = f"/v2/models/{model}/generate"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((server.http_host, server.http_port)) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: busy(server, "worker"), "the worker has the call")
        wait_until(lambda: not busy(server, "worker"), "the call was cancelled")


def busy(server: Server, model: str) -> bool:
    """Return True if a process has a request with an executor of the model."""
    return any(
        row.get("in_flight") for row in server.show("queues") if row["instance"].startswith(model)
    )


def runs(server: Server, model: str) -> bool:
    """Return True if the coordinator believes that the model's instance runs."""
    alive = server.processes()
    rows = [row for row in server.show("models") if row["model"] == model]
    return all(row["instance_state"] == "READY" and row["pid"] in alive for row in rows)


def test_the_called_executors_death_is_an_error_and_the_next_call_works(server: Server) -> None:
    code, text = bls(server, 'error worker {"do": "die"}')
    assert (code, "died while it had the request" in text) == (4, True)
    wait_until(lambda: runs(server, "worker"), "another executor runs")
    assert bls(server, "view")[0] == [1, 2, 3, 4]


def linked(server: Server) -> set[int]:
    """Return the pids of processes whose models have called other models."""
    return {row["pid"] for row in server.show("processes") if row["role"] == "model"}


def test_the_calling_executors_death_leaves_nothing(server: Server) -> None:
    # the model holds a slot of the worker's arena, and a part of the pool
    infer_large(server, "call keep")
    failed: list[int] = []

    def wait() -> None:
        document = {"inputs": [tensor("COMMAND", "BYTES", 'error worker {"do": "wait"}')]}
        failed.append(server.infer("bls", document)[0])

    client = threading.Thread(target=wait)
    client.start()
    wait_until(lambda: busy(server, "worker"), "the worker has the call")
    row = next(row for row in server.show("models") if row["model"] == "bls")
    os.kill(row["pid"], signal.SIGKILL)
    client.join(60)
    assert failed == [502]
    wait_until(lambda: row["pid"] not in linked(server), "its part of the pool comes back")
    wait_until(lambda: runs(server, "bls"), "another executor runs")
    wait_until(lambda: held(server) == [], "what it held comes back")
    assert bls(server, "view")[0] == [1, 2, 3, 4]


def test_tritonclient_and_models_as_documented(tmp_path: Path) -> None:
    folders = MODELS.parent
    shutil.copytree(folders / "calls_as_documented", tmp_path, dirs_exist_ok=True)
    shutil.copytree(folders / "triton_examples" / "simple", tmp_path / "simple")
    with Server(tmp_path, **SMALL) as server:
        triton("calls", server.address())
        wait_until(lambda: held(server) == [], "slots come back")
