"""Statistics of a real service agree with the answers to clients, whichever process dies."""

import collections
import http.client
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from tests.grpc_client import Client, request, tensor
from tests.holding import samples, statistics
from tests.running_server import WATCHDOG_S, free_port, open_fds, wait_until
from tests.servers import SMALL, Server, only, triton

HERE = Path(__file__).parent
MODELS = HERE.parent / "repositories" / "basic"
GOOD = {"inputs": [{"name": "IN", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]}
BAD = {"inputs": [{"name": "IN", "shape": [4], "datatype": "FP32", "data": [1, 2, 3]}]}


METRICS_BIND, TRACE_FILE = "SHMSERVE_METRICS_BIND", "SHMSERVE_TRACE_FILE"
AGENT_BIND = "SHMSERVE_AGENT_BIND"


@pytest.fixture
def counted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Server without any counts yet. Parameter: additional settings."""
    settings: dict[str, Any] = {
        "http_workers": 2,
        "grpc_processes": 0,
        "max_queue": 2,
        "trace_rate": 500,
    }
    settings |= {"metrics_bind": f"127.0.0.1:{free_port()}", "trace_file": tmp_path / "t.json"}
    settings |= {"agent_bind": f"127.0.0.1:{free_port()}"}
    (tmp_path / "t.json").write_text("of an earlier service")
    with Server(MODELS, **settings | getattr(request, "param", {})) as server:
        server.wait_instances()
        yield server


def command(text: str) -> Any:
    return {"inputs": [{"name": "COMMAND", "shape": [1], "datatype": "BYTES", "data": [text]}]}


def load(server: Server, clients: int, requests: list[tuple[str, Any]]) -> Any:
    """Every client sends all requests, each on a new connection; statuses by model."""
    seen: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    lock = threading.Lock()

    def client(_: int) -> None:
        for model, document in requests:
            status, _ = server.infer(model, document)
            with lock:
                seen[model][status] += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return seen


def success(server: Server, model: str) -> int:
    return int(statistics(server, model)["inference_stats"]["success"]["count"])


def scrape(server: Server, path: str = "/metrics") -> tuple[int, bytes]:
    """On the address of the metrics alone."""
    connection = http.client.HTTPConnection(server.environ[METRICS_BIND], timeout=WATCHDOG_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def page(server: Server) -> dict[tuple[str, ...], float]:
    """Return the samples of the page of metrics, wherever the server has it."""
    status, _, text = server.request("GET", "/metrics")
    if METRICS_BIND in server.environ:
        assert status == 404
        status, text = scrape(server)
    assert status == 200
    return samples(text)


def agent(server: Server) -> bytes:
    """Return the agent's answer to a load balancer, or b"" while there is no coordinator."""
    host, port = server.environ[AGENT_BIND].split(":")
    try:
        with socket.create_connection((host, int(port)), WATCHDOG_S) as peer:
            return peer.makefile("rb").read()
    except OSError:
        return b""


def failures(server: Server, model: str) -> dict[str, int]:
    name, of, told = "shmserve_request_failures_total", f"model={model}", page(server)
    found = [key[3].partition("=")[2] for key in told if key[0] == name and key[1] == of]
    values = [int(n) for key, n in told.items() if key[0] == name and key[1] == of]
    return {reason: count for reason, count in zip(found, values, strict=True) if count}


def test_counts_agree_with_the_clients_over_workers_and_instances(counted: Server) -> None:
    requests = [("pair", GOOD)] * 20 + [("pair", BAD)] * 3 + [("misbehaving", command("ok"))]
    requests += [("misbehaving", command("throw"))] * 2
    seen = load(counted, 6, requests)
    assert seen["pair"][200] + seen["pair"][400] + seen["pair"][503] == 6 * 23
    mine = statistics(counted, "pair")
    inference = mine["inference_stats"]
    assert inference["success"]["count"] == seen["pair"][200]
    assert inference["fail"]["count"] == seen["pair"][503]
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert inference[stage]["count"] == seen["pair"][200]
    assert mine["execution_count"] == mine["inference_count"] == seen["pair"][200]
    spent = sum(inference[s]["ns"] for s in ("queue", "compute_infer", "compute_output"))
    assert 0 < spent < inference["success"]["ns"]
    (batch,) = mine["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (1, seen["pair"][200])
    told = failures(counted, "pair")
    assert told.pop("bad_request") == 6 * 3
    assert told == ({"queue_full": seen["pair"][503]} if seen["pair"][503] else {})
    assert failures(counted, "misbehaving")["model"] == seen["misbehaving"][500]
    other = statistics(counted, "misbehaving")
    assert other["inference_stats"]["success"]["count"] == seen["misbehaving"][200]
    assert other["inference_stats"]["fail"]["count"] >= seen["misbehaving"][500]
    assert {row["name"] for row in counted.get("/v2/models/stats")[1]["model_stats"]} == {
        *("echo", "misbehaving", "pair")
    }
    key = ("shmserve_requests_total", "model=pair", "protocol=http", "version=1")
    assert page(counted)[key] == 6 * 23


@pytest.mark.parametrize("counted", [{"grpc_processes": 1}], indirect=True)
def test_both_protocols_count_into_the_same_model(counted: Server) -> None:
    array = np.ones(3, np.float32)
    with Client(counted.grpc_address) as client:
        for _ in range(4):
            client.call("ModelInfer", request(array, "echo", name="IN"))
        with pytest.raises(grpc.RpcError):
            client.call("ModelInfer", pb.ModelInferRequest(model_name="echo"))
    for _ in range(3):
        assert counted.infer("echo", GOOD)[0] == 200
    assert success(counted, "echo") == 7
    told = page(counted)
    for protocol, count in (("grpc", 5), ("http", 3)):
        key = ("shmserve_requests_total", "model=echo", f"protocol={protocol}", "version=1")
        assert told[key] == count


def repeat(count: int, delay_ms: int = 0) -> pb.ModelInferRequest:
    """A request to a decoupled worker: so many answers."""
    arrays = {
        "IN": ("INT32", np.arange(count, dtype=np.int32)),
        "DELAY": ("UINT32", np.full(count, delay_ms, np.uint32)),
        "WAIT": ("UINT32", np.zeros(1, np.uint32)),
    }
    request = pb.ModelInferRequest(
        model_name="repeat_int32",
        inputs=[tensor(array, name, kind) for name, (kind, array) in arrays.items()],
    )
    request.raw_input_contents.extend(array.tobytes() for _, array in arrays.values())
    return request


def test_answers_of_streams_are_counted_by_their_place() -> None:
    with Server(http_workers=1, **only("repeat_int32")) as server:
        server.wait_instances()
        with Client(server.grpc_address) as client:
            assert len(list(client.stream([repeat(3), repeat(2)]))) == 5
            wait_until(lambda: success(server, "repeat_int32") == 2, "both streams")
            told = statistics(server, "repeat_int32")
            stream = client.stream([repeat(1000, 50)])
            next(stream)
            stream.cancel()
        assert (told["execution_count"], told["inference_count"]) == (2, 2)
        assert told["inference_stats"]["queue"]["count"] == 2
        places = [told["response_stats"][index]["success"]["count"] for index in "012"]
        assert places == [2, 2, 1]
        assert told["response_stats"]["3"]["empty_response"]["count"] == 1
        wait_until(
            lambda: failures(server, "repeat_int32") == {"cancelled": 1}, "the cancelled stream"
        )
        assert statistics(server, "repeat_int32")["execution_count"] == 2


def test_a_model_that_is_loaded_again_goes_on_counting() -> None:
    with Server(MODELS, **only("*"), **SMALL) as server:
        for _ in range(3):
            assert server.infer("echo", GOOD)[0] == 200
        assert server.control("unload", "echo")[0] == 200
        wait_until(lambda: server.get("/v2/models/echo/stats")[0] == 404, "no statistics")
        assert "echo" not in {r["name"] for r in server.get("/v2/models/stats")[1]["model_stats"]}
        key = ("shmserve_requests_total", "model=echo", "protocol=http", "version=1")
        assert page(server)[key] == 3
        assert server.control("load", "echo")[0] == 200
        assert server.infer("echo", GOOD)[0] == 200
        inference = statistics(server, "echo")["inference_stats"]
        assert inference["success"]["count"] == inference["queue"]["count"] == 4


@pytest.mark.parametrize("counted", [{"request_timeout_s": 1}], indirect=True)
def test_deadlines_and_full_queues_are_failures_of_their_own(counted: Server) -> None:
    """Two workers accept two requests each. More are refused, and waiting requests expire."""
    seen = load(counted, 8, [("misbehaving", command("loop"))])["misbehaving"]
    assert seen[200] == 0
    assert seen[504] >= 2
    told = failures(counted, "misbehaving")
    assert told["deadline"] == seen[504]
    assert told.get("queue_full", 0) == seen[503]
    assert statistics(counted, "misbehaving")["inference_stats"]["fail"]["count"] == 8
    # a stop would wait for the model
    os.kill(counted.pids("executor misbehaving")[0], signal.SIGKILL)


def test_no_death_loses_a_count(counted: Server) -> None:
    answered = 0
    before: dict[tuple[str, ...], float] = {}
    for role in ("executor echo", "http worker", "coordinator", "supervisor"):
        for _ in range(10):
            status, _ = ask(counted)
            answered += status == 200
        pids = counted.pids(role)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: gone(counted, role, pids), f"another {role}")  # noqa: B023
        wait_until(counted.ready, "readiness")
        counted.wait_linked()
        wait_until(lambda: agent(counted) == b"100%\n", "load balancers are told, by whomever")
        assert success(counted, "echo") == answered, role
        # a coordinator counts processor time from its own start
        now = {key: value for key, value in page(counted).items() if "_cpu_" not in key[0]}
        for key, value in before.items():
            assert not key[0].endswith(("_total", "_count")) or now[key] >= value, key
        before = now
    ends = {k[1]: v for k, v in before.items() if k[0] == "shmserve_process_ends_total"}
    assert ends == {"role=executor": 1, "role=http": 1}


def gone(server: Server, role: str, pids: list[int]) -> bool:
    now = server.pids(role)
    return len(now) == len(pids) and pids[0] not in now


def ask(server: Server) -> tuple[int, Any]:
    try:
        return server.infer("echo", GOOD)
    # the worker of this connection has just been killed
    except (OSError, http.client.HTTPException):
        return 0, None


def test_executor_and_coordinator_at_once(counted: Server) -> None:
    """The supervisor keeps the page of the dead executor for the next coordinator."""
    for _ in range(25):
        assert counted.infer("echo", GOOD)[0] == 200
    assert success(counted, "echo") == 25  # the executor counts after the last answer
    for role in ("coordinator", "executor echo"):
        os.kill(counted.pids(role)[0], signal.SIGKILL)
    counted.wait_linked()
    inference = statistics(counted, "echo")["inference_stats"]
    assert inference["success"]["count"] == inference["queue"]["count"] == 25


def test_pages_of_the_dead_leave_no_descriptors(counted: Server) -> None:
    def kill_one() -> None:
        for role in ("executor echo", "http worker"):
            pids = counted.pids(role)
            os.kill(pids[0], signal.SIGKILL)
            wait_until(lambda: gone(counted, role, pids), f"another {role}")  # noqa: B023
        counted.wait_instances()
        counted.wait_linked()
        wait_until(lambda: all_counted(counted), "the pages of the new ones")

    def held() -> tuple[int, int]:
        return open_fds(counted.pids("coordinator")[0]), open_fds(counted.pids("supervisor")[0])

    kill_one()
    wait_until(lambda: ended(counted) == 2, "both added up")
    before = held()
    for round in range(2):
        kill_one()
        wait_until(lambda: ended(counted) == 4 + 2 * round, "both added up")  # noqa: B023
    # The supervisor learns of the death later, and a connection may be on its way
    wait_until(
        lambda: all(now <= then + 1 for now, then in zip(held(), before, strict=True)),
        "descriptors are left",
    )


def all_counted(server: Server) -> bool:
    pages = sum(v for k, v in page(server).items() if k[0] == "shmserve_processes")
    return pages == len(server.pids("executor") + server.pids("http worker"))


def ended(server: Server) -> int:
    return int(sum(v for k, v in page(server).items() if k[0] == "shmserve_process_ends_total"))


@pytest.mark.parametrize("counted", [{"request_timeout_s": 1}], indirect=True)
def test_metrics_do_not_wait_for_an_executor_that_is_stuck(counted: Server) -> None:
    assert counted.infer("misbehaving", command("loop"))[0] == 504
    pid = counted.pids("executor misbehaving")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        told = page(counted)
        key = ("shmserve_queue_depth", "instance=misbehaving/1/0", "model=misbehaving", "version=1")
        assert told[key] == 1
        assert told["shmserve_executor_busy_seconds", *key[1:]] > 0
        assert told["shmserve_unreadable_pages",] == 0
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_coordinator_that_is_stuck_is_a_503_in_time(counted: Server) -> None:
    counted.wait_arenas()
    pid = counted.pids("coordinator")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        status, document = counted.get("/v2/models/stats")
        assert (status, "coordinator" in document["error"]) == (503, True)
        assert counted.infer("echo", GOOD)[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------ logs and traces


def post(server: Server, path: str, document: Any) -> Any:
    status, told = server.post(path, document)
    assert status == 200, told
    return told


def test_log_settings_reach_every_process_also_later_ones(counted: Server) -> None:
    post(counted, "/v2/logging", {"log_format": "ISO8601", "log_verbose_level": 1})
    os.kill(counted.pids("coordinator")[0], signal.SIGKILL)
    counted.wait_linked()
    os.kill(counted.pids("executor misbehaving")[0], signal.SIGKILL)
    stamp = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z \w+ (\w+)", re.MULTILINE)

    def told() -> bool:
        """Return True once both have logged; an executor may log before it gets the settings."""
        counted.infer("misbehaving", command("throw"))
        return {"supervisor", "executor"} <= set(stamp.findall(counted.log()))

    wait_until(told, "lines in the new format")
    assert counted.get("/v2/logging")[1]["log_format"] == "ISO8601"
    post(counted, "/v2/logging", {"log_info": False, "log_warning": False, "log_verbose_level": 0})

    def quiet() -> bool:
        """Kill an executor; return True if the supervisor did not log it. The supervisor may get
        the settings later than the test."""
        counted.wait_instances()
        before, pids = len(counted.log()), counted.pids("executor echo")
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: gone(counted, "executor echo", pids), "another executor")
        return "executor ended" not in counted.log()[before:]

    wait_until(quiet, "silence")


@pytest.mark.parametrize("counted", [{"grpc_processes": 1}], indirect=True)
def test_no_more_requests_are_traced_than_were_asked_for(counted: Server) -> None:
    path = "/v2/models/pair/trace/setting"
    assert counted.get(path)[1] == {
        "trace_level": ["OFF"],
        "trace_rate": "500",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "t.json",
        "trace_mode": "triton",
    }
    settings: dict[str, Any] = {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "1",
        "trace_count": "7",
    }
    post(counted, path, settings)
    seen = load(counted, 4, [("pair", GOOD)] * 10 + [("echo", GOOD)])
    assert seen["pair"][200] > 7
    wait_until(lambda: counted.get(path)[1]["trace_count"] == "0", "all traces")
    wait_until(lambda: len(traces(counted)) >= 7, "all of them in the file")
    threading.Event().wait(1.5)  # more would be told of within a second
    post(counted, "/v2/models/echo/trace/setting", {**settings, "log_frequency": "2"})
    message = request(np.zeros(3, np.float32), "echo", name="IN")
    with Client(counted.grpc_address) as client:
        for _ in range(3):
            client.infer(message)
    wait_until(lambda: len(traces(counted, ".0") | traces(counted, ".1")) == 3, "gRPC's")
    found = traces(counted)
    assert len(found) == 7
    others = traces(counted, ".0") | traces(counted, ".1")
    assert len(found | others) == 10, "no id is there twice"
    for name, frontend, some in (("pair", "HTTP_RECV", found), ("echo", "GRPC_WAITREAD", others)):
        assert {trace["model_name"] for trace in some.values()} == {name}
        for trace in some.values():
            assert trace["times"][f"{frontend}_START"] <= trace["times"]["REQUEST_START"]
            assert list(trace["times"].values()) == sorted(trace["times"].values())
            assert len(trace["tensors"]) == (2 if name == "echo" else 3)


def traces(server: Server, suffix: str = "") -> dict[int, Any]:
    """Return traces by id, gathered as a reader of Triton's trace files does."""
    try:
        rows = json.loads(Path(server.environ[TRACE_FILE] + suffix).read_text())
    except (FileNotFoundError, ValueError):  # no file yet, or just being written
        rows = []
    found: dict[int, Any] = {}
    for row in rows:
        trace = found.setdefault(row["id"], {"times": {}, "tensors": []})
        trace.update({k: v for k, v in row.items() if k.startswith("model")})
        trace["times"].update({stamp["name"]: stamp["ns"] for stamp in row.get("timestamps", ())})
        trace["tensors"] += [row["tensor"]] if "tensor" in row else []
    return found


def test_tritonclient_reads_statistics_and_changes_settings(counted: Server) -> None:
    triton("settings", counted.address())


def test_show_stats(counted: Server) -> None:
    counted.infer("echo", GOOD)
    rows = {row["model"]: row for row in counted.show("stats")}
    assert (rows["echo"]["answered"], rows["echo"]["executions"]) == (1, 1)
    assert rows["echo"]["request_ms"] > 0
