"""Sequences in a real server: their instances, the flags for models, and the effects of a death."""

import http.client
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from tests.grpc_client import Client, request
from tests.holding import Hold, in_flight, statistics
from tests.running_server import wait_until
from tests.servers import Server, triton
from tests.unit.executor.test_onnx_backend import save, value

MODELS = Path(__file__).parents[1] / "repositories" / "sequences"
helper, T = onnx.helper, onnx.TensorProto
INTO, OUT = ("IN", "BEFORE"), ("OUT", "AFTER")


def write_total(folder: Path) -> None:
    """Write an ONNX model whose state is the running total of its inputs."""
    nodes = [helper.make_node("Add", ["IN", "BEFORE"], ["OUT"])]
    nodes.append(helper.make_node("Identity", ["OUT"], ["AFTER"]))
    ends = ([value(name, T.FLOAT, ["N", 2]) for name in names] for names in (INTO, OUT))
    save(folder, nodes, *ends, config="")


def copy(models: Path, name: str, config: str) -> None:
    """The model `tally` under another name."""
    shutil.copytree(models / "tally", models / name)
    (models / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(MODELS, models, dirs_exist_ok=True)
    write_total(models / "total")
    tally = (models / "tally" / "config.pbtxt").read_text()
    copy(
        models, "names", tally.replace("TYPE_UINT64", "TYPE_STRING").replace("count: 3", "count: 1")
    )
    brief = (
        tally.replace("60000000", "300000").replace("32 }", "1 }").replace("count: 3", "count: 1")
    )
    copy(models, "brief", brief)
    counting = (models / "countdown" / "config.pbtxt").read_text()
    shutil.copytree(models / "countdown", models / "countdowns")
    (models / "countdowns" / "config.pbtxt").write_text(
        counting + "model_transaction_policy { decoupled: true }"
    )
    wide = tally.replace("count: 3", "count: 4").replace("32 }", "64 }")
    copy(models, "wide", wide)
    with Server(models, http_workers=2, grpc_processes=2) as server:
        server.wait_instances()
        yield server


def post(
    server: Server, model: str, tensor: dict[str, Any], flags: str, **parameters: Any
) -> tuple[int, Any]:
    """Send a request on a new connection, to any worker. `flags`: "start", "end" or both."""
    told = {f"sequence_{flag}": True for flag in flags.split()}
    document = {"inputs": [tensor], "parameters": {**parameters, **told}}
    return server.infer(model, document)


def add(
    server: Server, number: Any, value: int, flags: str = "", model: str = "tally"
) -> dict[str, list[int]]:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    status, document = post(server, model, tensor, flags, sequence_id=number)
    assert status == 200, document
    return {output["name"]: output["data"] for output in document["outputs"]}


def refusal(server: Server, tensor: dict[str, Any], flags: str, **parameters: Any) -> str:
    status, document = post(server, "tally", tensor, flags, **parameters)
    assert status == 400, document
    error: str = document["error"]
    return error


def say(server: Server, sequence: str, command: str = "", flags: str = "") -> str:
    tensor = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": [command]}
    status, document = post(server, "slots", tensor, flags, sequence_id=sequence)
    assert status == 200, document
    text: str = document["outputs"][0]["data"][0]
    return text


IN = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}


def test_each_sequence_stays_where_it_began(server: Server, threads: ThreadPoolExecutor) -> None:
    def run(number: int) -> int:
        pids = set()
        for step in range(6):
            flags = {0: "start", 5: "end"}.get(step, "")
            outputs = add(server, number, number + step, flags)
            assert outputs["SUM"] == [sum(number + each for each in range(step + 1))]
            pid, start, end, flag_bits = outputs["SEEN"]
            assert (start, end) == (step == 0, 2 if step == 5 else -1)
            assert flag_bits == (step == 0) | (step == 5) << 1
            pids.add(pid)
        (pid,) = pids
        return pid

    assert len(set(threads.map(run, range(1, 13)))) == 3
    stats = statistics(server, "tally")
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == 72
    assert [in_flight(server, f"tally/1/{index}") for index in range(3)] == [0, 0, 0]


def test_200_interleaved_sequences_on_4_instances(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    numbers = list(range(1001, 1201))
    order = random.Random(1)
    pids: dict[int, set[int]] = {number: set() for number in numbers}
    for step in range(4):
        flags = {0: "start", 3: "end"}.get(step, "")
        order.shuffle(numbers)

        def ask(number: int, step: int = step, flags: str = flags) -> None:
            outputs = add(server, number, number + step, flags, "wide")
            assert outputs["SUM"] == [sum(number + each for each in range(step + 1))]
            pids[number].add(outputs["SEEN"][0])

        list(threads.map(ask, numbers))
    assert all(len(homes) == 1 for homes in pids.values())  # no sequence has moved
    homes = Counter(pid for (pid,) in pids.values())
    assert len(homes) == 4
    assert statistics(server, "wide")["inference_count"] == 800


def test_refusals_have_the_words_of_triton(server: Server) -> None:
    assert refusal(server, IN, "") == (
        "inference request to model 'tally' must specify a non-zero or non-empty correlation ID"
    )
    assert refusal(server, IN, "start", sequence_id="") == refusal(server, IN, "", sequence_id=0)
    unknown = (
        "inference request for sequence {} to model 'tally' must specify the START flag on the "
        "first request of the sequence"
    )
    assert refusal(server, IN, "", sequence_id=77) == unknown.format(77)
    assert add(server, 77, 1, "start end")["SUM"] == [1]
    assert refusal(server, IN, "end", sequence_id=77) == unknown.format(77)  # the sequence is over
    rows = (
        (2, "must specify batch-size 1 due to requirements of sequence batcher"),
        (0, "batch-size must be >= 1 for 'tally'"),
    )
    for count, text in rows:
        other = {"name": "IN", "datatype": "INT32", "shape": [count, 1], "data": [1] * count}
        assert text in refusal(server, other, "start", sequence_id=78)
    assert refusal(server, IN, "start", sequence_id="name") == (
        "sequence_id 'name' does not fit TYPE_UINT64 of the control input 'ID'"
    )
    assert statistics(server, "tally")["inference_stats"]["fail"]["count"] == 7


def test_what_clients_do_not_send_is_in_no_metadata(server: Server) -> None:
    for model, names in (("tally", ["IN", "SUM", "SEEN"]), ("total", ["IN", "OUT"])):
        _, metadata = server.get(f"/v2/models/{model}")
        assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == names
        _, config = server.get(f"/v2/models/{model}/config")
        assert [tensor["name"] for tensor in config["input"] + config["output"]] == names
    assert config["sequence_batching"]["state"][0]["input_name"] == "BEFORE"
    assert "dynamic_batching" not in config


def test_states_of_an_onnx_model_are_each_sequences_own(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    def ask(number: int, flags: str = "") -> list[float]:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [number, 0.5]}
        status, document = post(server, "total", tensor, flags, sequence_id=number)
        assert status == 200, document
        assert [output["name"] for output in document["outputs"]] == ["OUT"]
        found: list[float] = document["outputs"][0]["data"]
        return found

    def together(first: str = "", others: str = "") -> list[list[float]]:
        flags = [first, others, others, others]
        return list(threads.map(ask, range(1, 5), flags))

    def sums(*steps: int) -> list[list[float]]:
        return [[number * step, 0.5 * step] for number, step in enumerate(steps, 1)]

    assert together("start", "start") == sums(1, 1, 1, 1)
    assert together() == sums(2, 2, 2, 2)
    # the first sequence has begun anew, in the same slot
    assert together("start") == sums(1, 3, 3, 3)
    assert together("end", "end") == sums(2, 4, 4, 4)
    # Each request waited for the others, as configured
    assert [row["batch_size"] for row in statistics(server, "total")["batch_stats"]] == [4]


def test_direct_has_a_row_for_each_slot_and_more_sequences_wait(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    assert say(server, "a", flags="start") == "a in 0, 1 ready, step 10"
    assert say(server, "b", flags="start") == "b in 1, 1 ready, step 10"
    assert say(server, "c", flags="start") == "c in 2, 1 ready, step 10"
    assert say(server, "b") == "b in 1, 1 ready, step 11"
    with Hold(tmp_path) as hold:
        held = threads.submit(say, server, "a", f"hold:{hold.path}")
        hold.wait_begun()
        later: list[Future[str]] = [threads.submit(say, server, each) for each in "bc"]
        waits = threads.submit(say, server, "d", "", "start")
        wait_until(lambda: in_flight(server, "slots/1/0") == 4, "not all are there")
    assert held.result() == "a in 0, 1 ready, step 11"
    ends = [re.sub(r"[12] ready", "ready", each.result()) for each in later]
    assert ends == ["b in 1, ready, step 12", "c in 2, ready, step 11"]
    assert not waits.done()
    assert say(server, "b", flags="end") == "b in 1, 1 ready, step 13"
    assert waits.result() == "d in 1, 1 ready, step 10"
    # else the sequences keep all the slots until they have been idle for a minute
    for name in "acd":
        say(server, name, flags="end")


def test_a_sequence_that_says_nothing_ends(server: Server) -> None:
    assert add(server, 1, 5, "start", "brief")["SUM"] == [5]
    assert add(server, 2, 6, "start", "brief")["SUM"] == [6]  # a slot is free
    status, document = post(server, "brief", IN, "", sequence_id=1)
    assert status == 400
    assert "must specify the START flag" in document["error"]


def test_a_death_ends_the_sequences_that_lived_there_and_no_others(server: Server) -> None:
    homes = {number: add(server, number, number, "start")["SEEN"][0] for number in range(201, 213)}
    victim = homes[201]
    dead = [number for number, pid in homes.items() if pid == victim]
    assert 0 < len(dead) < len(homes)
    os.kill(victim, signal.SIGKILL)
    for number in homes:
        if number not in dead:
            assert add(server, number, 1)["SUM"] == [number + 1]
            continue
        status, document = post(server, "tally", IN, "", sequence_id=number)
        # the request may have been sent just before the kill
        assert status in (400, 502, 503), document
        wanted = "must specify the START flag" if status == 400 else "it is being restarted"
        assert wanted in document["error"]

    def begins_again() -> bool:  # as soon as no frontend takes the dead executor for alive
        return post(server, "tally", IN, "start", sequence_id=dead[0])[0] == 200

    wait_until(begins_again, "a sequence that has ended cannot begin again")
    server.wait_instances()
    for number in homes:  # a new executor has not changed the places of sequences
        if number not in dead:
            assert add(server, number, 1, "end")["SUM"] == [number + 2]
    assert add(server, dead[0], 5, "end")["SUM"] == [6]


def test_kill_9_in_the_midst_of_a_batch_of_sequences(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Each request fails, its sequence has ended, and the slot is free for another sequence."""
    names = ("a", "b", "c")
    for name in names:
        say(server, name, flags="start")

    def step(name: str) -> tuple[int, Any]:
        tensor = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1]}
        return post(
            server, "slots", {**tensor, "data": [f"hold:{hold.path}"]}, "", sequence_id=name
        )

    with Hold(tmp_path) as hold:
        futures = [threads.submit(step, name) for name in names]
        hold.wait_begun()
        wait_until(lambda: in_flight(server, "slots/1/0") == len(names), "not all have come")
        (victim,) = server.pids("executor slots")
        os.kill(victim, signal.SIGKILL)
        hold.let_go()
        answers = [future.result() for future in futures]
    assert [status for status, _ in answers] == [502] * len(names)
    assert all("it is being restarted" in document["error"] for _, document in answers)
    wait_until(lambda: server.pids("executor slots") not in ([], [victim]), "it is not back")
    server.wait_instances()
    tensor = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": [""]}
    for name in names:
        status, document = post(server, "slots", tensor, "", sequence_id=name)
        assert status == 400, document
        assert "must specify the START flag" in document["error"]
    for name in names:  # as many sequences as slots: no slot is lost
        assert say(server, name, flags="start").endswith("step 10")
    for name in names:
        say(server, name, flags="end")
    wait_until(lambda: not server.show("slots"), "slots are not given back")


def count(server: Server, runs: int, hold: str = "") -> tuple[int, Any]:
    tensor = {"name": "COUNT", "datatype": "INT32", "shape": [1, 1], "data": [runs]}
    return server.infer("countdown", {"inputs": [tensor], "parameters": {"hold": hold}})


def test_requests_run_again_until_the_model_releases_them(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Hold(tmp_path) as hold:
        many = threads.submit(count, server, 60, str(hold.path))
        hold.wait_begun()
        # later requests join these runs
        few = [threads.submit(count, server, 5) for _ in range(3)]
        wait_until(lambda: in_flight(server, "countdown/1/0") == 4, "not all are there")
    for status, document in (each.result() for each in few):
        assert status == 200, document
        assert document["outputs"][0]["data"] == [5, 0, 0, 2]
    status, document = many.result()
    assert (status, document["outputs"][0]["data"][:3]) == (200, [60, 0, 0])
    status, document = count(server, -3)
    assert status == 500
    assert "as it was told" in document["error"]
    stats = statistics(server, "countdown")
    assert stats["inference_stats"]["success"]["count"] == 4
    assert stats["inference_stats"]["fail"]["count"] == 1
    sizes = {row["batch_size"]: row["compute_infer"]["count"] for row in stats["batch_stats"]}
    assert sum(size * runs for size, runs in sizes.items()) == stats["inference_count"] == 77
    assert stats["execution_count"] == sum(sizes.values())
    assert sizes[2] == 15
    assert in_flight(server, "countdown/1/0") == 0


def test_tritonclient_sends_sequences(server: Server) -> None:
    triton("sequences", server.address(), server.grpc_address)


def counting(model: str, runs: int, hold: Hold | None = None) -> pb.ModelInferRequest:
    """Return a request for `runs` runs. With `hold` the first waits, and no request shares runs."""
    array = np.array([[runs] if hold is None else [runs, 0]], np.int32)
    more = {} if hold is None else {"hold": str(hold.path)}
    return request(array, model, name="COUNT", datatype="INT32", **more)


def frontend_of(server: Server, model: str) -> int:
    """Return the pid of the frontend with a request in flight to a single-instance model, once
    that request has run."""
    runs = statistics(server, model)["execution_count"]
    wait_until(lambda: statistics(server, model)["execution_count"] > runs, "it does not run")
    rows = [row for row in server.show("queues") if row.get("instance") == f"{model}/1/0"]
    (process,) = [row["process"] for row in rows if row.get("in_flight")]
    (pid,) = [row["pid"] for row in server.show("processes") if row["process"] == process]
    return pid


def runs_alone(client: Client, model: str) -> bool:
    """Return True if no other request runs in this model now."""
    (answer,) = client.stream([counting(model, 1)])
    return bool(np.frombuffer(answer.infer_response.raw_output_contents[0], np.int32)[3] == 1)


LONG = 3000  # runs, which take half a minute


@pytest.mark.parametrize(("model", "door"), [("countdown", "grpc"), ("countdowns", "http")])
def test_kill_9_of_a_frontend_between_two_runs_of_its_request(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path, model: str, door: str
) -> None:
    """The frontend's request is dropped, not run again. Those of other frontends are answered."""
    with Client(server.grpc_address) as doomed, Client(server.grpc_address) as client:
        if door == "grpc":
            sent = threads.submit(doomed.error, "ModelInfer", counting(model, LONG))
        else:
            body = json.dumps({"COUNT": LONG}).encode()
            path = f"/v2/models/{model}/generate_stream"
            sent = threads.submit(server.request, "POST", path, body)  # type: ignore[arg-type]
        victim = frontend_of(server, model)
        with Hold(tmp_path) as hold:
            if door == "grpc":
                document = {"name": "COUNT", "datatype": "INT32", "shape": [1, 2], "data": [2, 0]}
                parameters = {"hold": str(hold.path)}
                other = threads.submit(
                    server.infer, model, {"inputs": [document], "parameters": parameters}
                )
            else:
                other = threads.submit(list, client.stream([counting(model, 2, hold)]))  # type: ignore[arg-type]
            hold.wait_begun()
            os.kill(victim, signal.SIGKILL)
            if door == "grpc":
                assert sent.result()[0] == "UNAVAILABLE"
            else:
                with pytest.raises((OSError, http.client.HTTPException)):
                    sent.result()
        if door == "grpc":
            status, answer = other.result()
            assert (status, answer["outputs"][0]["data"][0]) == (200, 2)
        else:
            assert [answer.error_message for answer in other.result()] == ["", ""]
        wait_until(lambda: runs_alone(client, model), "it is run again")
    wait_until(lambda: not server.show("slots"), "slots are not given back")
    server.wait_linked()
    wait_until(lambda: len(server.pids(door)) == 2, "the frontend is not back")


def test_kill_9_of_an_executor_between_two_runs(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Waiting requests fail, and later requests are served."""
    with Client(server.grpc_address) as client:
        for model in ("countdown", "countdowns"):
            paused = threads.submit(list, client.stream([counting(model, LONG)]))
            frontend_of(server, model)
            (tmp_path / model).mkdir()
            with Hold(tmp_path / model) as hold:
                held = threads.submit(list, client.stream([counting(model, 2, hold)]))
                hold.wait_begun()
                (victim,) = server.pids(f"executor {model}/")
                os.kill(victim, signal.SIGKILL)
                ends = [each.result()[-1] for each in (paused, held)]
            for end in ends:
                assert "it is being restarted" in end.error_message
                assert end.infer_response.parameters["triton_final_response"].bool_param
            wait_until(lambda: in_flight(server, f"{model}/1/0") == 0, "requests are left")  # noqa: B023
            server.wait_instances()
            assert runs_alone(client, model)
    wait_until(lambda: not server.show("slots"), "slots are not given back")


def steps(number: int, count: int, flags: str = "") -> pb.ModelInferRequest:
    """A request of a sequence of `counter`."""
    array = np.array([[count]], np.int32)
    told: dict[str, Any] = {f"sequence_{flag}": True for flag in flags.split()}
    told |= {"sequence_id": number, "triton_enable_empty_final_response": True}
    return request(array, "counter", f"{number}/{count}{flags}", "IN", "INT32", **told)


def test_streams_of_answers_to_requests_of_sequences(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    """All requests of a stream are sent before an answer is looked at."""
    counts = (5, 0, 40, 3)
    flags = ("start", "", "", "end")

    def run(numbers: range) -> dict[int, tuple[list[int], set[int], int]]:
        found: dict[int, tuple[list[int], set[int], int]] = {n: ([], set(), 0) for n in numbers}
        sent = [steps(n, c, f) for c, f in zip(counts, flags, strict=True) for n in numbers]
        with Client(server.grpc_address) as client:
            for answer in client.stream(sent):
                assert not answer.error_message
                response = answer.infer_response
                number = int(response.id.partition("/")[0])
                sums, pids, ends = found[number]
                if response.raw_output_contents:
                    sums += np.frombuffer(response.raw_output_contents[0], np.int32).tolist()
                    pids |= set(np.frombuffer(response.raw_output_contents[1], np.int64).tolist())
                ends += response.parameters["triton_final_response"].bool_param
                found[number] = sums, pids, ends
        return found

    homes: Counter[int] = Counter()
    for found in threads.map(run, [range(first, first + 6) for first in (3001, 3101, 3201)]):
        for sums, pids, ends in found.values():
            assert sorted(sums) == list(range(1, sum(counts) + 1))
            assert ends == len(counts)
            assert len(pids) == 1
            homes.update(pids)
    assert len(homes) == 2
    with Client(server.grpc_address) as client:
        answers = [*client.stream([steps(3001, 1), steps(3001, 1, "start end")])]
        (unknown,) = [answer for answer in answers if answer.error_message]
        known, end = [answer for answer in answers if not answer.error_message]
        assert "must specify the START flag" in unknown.error_message
        assert np.frombuffer(known.infer_response.raw_output_contents[0], np.int32) == [1]
        assert end.infer_response.parameters["triton_final_response"].bool_param
    assert [in_flight(server, f"counter/1/{index}") for index in range(2)] == [0, 0]
    wait_until(lambda: not server.show("slots"), "slots are not given back")
