"""Lanes: local programs talk to executors, with valid and with hostile messages."""

import contextlib
import itertools
import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

import shmserve.client
from shmserve.client import Client, InferenceError
from shmserve.protocol.control import client_messages as control
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.lane_messages import LaneOutput, LaneTensor, LaneWindow
from tests.holding import metric, statistics
from tests.integration.lane_client import Program, RawLane, command, floats, in_region, request
from tests.running_server import open_fds, wait_until
from tests.servers import SMALL, Server, inference_error, only

MODELS = "tests/repositories/basic,tests/repositories/streams"
SETTINGS: dict[str, Any] = {
    **only("echo,pair,misbehaving,teller"),
    **SMALL,
    "send_timeout_s": 1,
    "max_lanes": 12,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODELS, **SETTINGS) as server:
        server.wait_instances()
        before = server.pids("executor")
        # The first message makes an executor open its event file, which then stays open
        with Program(server.run_dir) as program, program.lane("misbehaving") as lane:
            lane.send(b"nonsense")
            assert lane.ended()
        yield server
        assert server.pids("executor") == before, "every executor survives all of this"


@pytest.fixture
def program(server: Server) -> Iterator[Program]:
    with Program(server.run_dir) as program:
        yield program
        program.ask(control.Unregister())


def connect(server: Server) -> Client:
    client = shmserve.client.connect(f"unix:{server.unix_path}")
    assert client.shared_memory
    return client


def counts(server: Server, model: str) -> tuple[int, int]:
    """Return the numbers of succeeded and failed requests; successes equal executions."""
    inference = statistics(server, model)["inference_stats"]
    return inference["success"]["count"], inference["fail"]["count"]


# -------------------------------------------------------------------------- the client's way


@pytest.mark.parametrize("count", [3, 5000, 1 << 18])
def test_the_client_goes_over_a_lane_and_is_counted_once(server: Server, count: int) -> None:
    x = np.arange(count, dtype=np.float32)
    before = counts(server, "echo")
    with connect(server) as client:
        first = client.infer("echo", {"IN": x}, request_id="a", receipt=True)
        result = client.infer("echo", {"IN": x}, request_id="a", receipt=True)
        assert first.transport == "http", "the output's size was not known"
        assert result.transport == "lane"
        assert (result.id, result.version, result.model) == (first.id, first.version, first.model)
        assert np.array_equal(first["OUT"], x)
        assert np.array_equal(result["OUT"], x)
        assert result.receipt is not None
        small = 2 * x.nbytes if x.nbytes < 4096 else 0
        copied = result.receipt["copied_bytes"]
        assert result.receipt["inline_bytes"] == small
        assert copied["in"] + copied["out"] == small
        with inference_error(400, "unexpected shape"):
            client.infer("echo", {"IN": x.reshape(1, -1)})
    after = counts(server, "echo")
    assert after[0] - before[0] == 2


def test_a_request_is_counted_when_its_answer_is_there(server: Server) -> None:
    x = np.arange(3, dtype=np.float32)
    with connect(server) as client:
        client.infer("echo", {"IN": x})
        before, _ = counts(server, "echo")
        for number in range(1, 101):
            assert client.infer("echo", {"IN": x}).transport == "lane"
            stats = statistics(server, "echo")
            assert stats["inference_stats"]["success"]["count"] == before + number
            assert stats["execution_count"] == stats["inference_stats"]["success"]["count"]


def test_a_region_registered_anew_is_other_memory_at_once(program: Program) -> None:
    asked = request(1, in_region("mine", 4), outputs=(LaneOutput("OUT"),))
    with program.lane("echo") as lane:
        for value in range(1, 6):
            memory = program.region("mine", 4096).view(np.float32)
            memory[:4] = value
            for _ in range(3):
                (output,) = lane.ask(asked).outputs
                assert output.at == memory[:4].tobytes()
            program.ask(control.Unregister(("mine",)))
            assert lane.ask(asked).status == 404


@pytest.mark.parametrize("outputs", [None, ["N"]])  # with windows and without
def test_a_stream_goes_over_a_lane_and_is_counted_once(
    server: Server, outputs: list[str] | None
) -> None:
    before, copied = counts(server, "teller"), copied_bytes(server, "teller")
    with connect(server) as client:
        options: dict[str, Any] = {"request_id": "a", "receipt": True}
        results = list(client.stream("teller", told("in_thread:300"), outputs, **options))
        assert [int(result["N"][0]) for result in results] == list(range(300))
        assert {(r.transport, r.id, r.model, r.version) for r in results} == {
            ("lane", "a", "teller", "1")
        }
        told_copied = [result.receipt["copied_bytes"] for result in results if result.receipt]
        assert len(told_copied) == 300
        assert [c["in"] for c in told_copied[:2]] == [4 + len("in_thread:300"), 0]
    after = counts(server, "teller")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
    now = copied_bytes(server, "teller")
    assert now - copied == sum(c["in"] + c["out"] for c in told_copied), "receipts tell it all"


def test_large_answers_wait_until_they_are_taken(server: Server) -> None:
    with connect(server) as client:
        kept = []
        for result in client.stream("teller", told("big:5"), max_output_bytes=1 << 20):
            assert result.transport == "lane"
            result["DATA"][:] = int(result["N"][0])
            kept.append(result["DATA"])
        assert [(x.shape, set(x.tolist())) for x in kept] == [((1 << 20,), {n}) for n in range(5)]
        texts = [r["TEXT"][0] for r in client.stream("teller", told("texts:3,70000,5"))]
        assert [text.decode() for text in texts] == ["x" * n for n in (3, 70000, 5, 0)]
        stream = client.stream("teller", told("texts:3,70000,5"), max_output_bytes=8192)
        assert next(stream)["TEXT"][0] == b"xxx"
        with inference_error(400, "should be at least 70004 bytes"):
            next(stream)
        assert [len(r["TEXT"][0]) for r in stream] == [5, 0], "it is that answer's error alone"


def test_a_stream_that_is_closed_gives_all_back(server: Server) -> None:
    with connect(server) as client:
        cancelled = number_of(client, "told")
        for command, outputs in (("big:1000000", None), ("slowly:1000000", ["N"])):
            with client.stream("teller", told(command), outputs) as stream:
                assert [int(next(stream)["N"][0]) for _ in range(3)] == [0, 1, 2]
            assert list(stream) == []
        wait_until(lambda: number_of(client, "told") == cancelled + 2, "the model was not told")
        wait_until(lambda: not server.show("slots"), "slots are held")
        x = np.zeros(10, np.float32)
        client.infer("echo", {"IN": x})
    assert [row for row in server.show("regions") if row["pid"] == os.getpid()] == []


def test_streams_at_a_time(server: Server) -> None:
    with connect(server) as client:
        streams = [client.stream("teller", told("slowly:20"), timeout=60) for _ in range(4)]
        rows = [[int(r["N"][0]) for r in answers] for answers in zip(*streams, strict=True)]
        assert rows == [[n] * 4 for n in range(20)]


def test_the_end_of_a_stream(server: Server) -> None:
    with connect(server) as client:
        for command, words in (
            ("forget:2", "without sending its final response"),
            ("throw:2", "no such luck"),
        ):
            stream = client.stream("teller", told(command))
            assert [int(next(stream)["N"][0]) for _ in range(2)] == [0, 1]
            with inference_error(500, words):
                next(stream)
            assert list(stream) == []
        stream = client.stream("teller", told("slowly:1000000"), timeout=0.5)
        with inference_error(0, "did not answer in time"):
            list(stream)
        with inference_error(501):
            client.infer("teller", told("count:1"))
        assert [int(r["N"][0]) for r in client.stream("teller", told("count:2"))] == [0, 1]


@pytest.mark.parametrize("lanes", [True, False])
def test_nothing_is_asked_of_a_closed_client(server: Server, lanes: bool) -> None:
    x = np.zeros(3, np.float32)
    with shmserve.client.connect(f"unix:{server.unix_path}", lanes=lanes) as client:
        client.infer("echo", {"IN": x})
        assert number_of(client, "count:1") == 0
    for ask in (
        lambda: client.infer("echo", {"IN": x}),
        lambda: next(client.stream("echo", {"IN": x})),
        lambda: next(client.stream("teller", told("count:1"))),
    ):
        with pytest.raises(InferenceError, match="the client is closed"):
            ask()


def told(text: str) -> dict[str, Any]:
    return {"COMMAND": [text.encode()]}


def number_of(client: Client, command: str) -> int:
    (result,) = client.stream("teller", told(command))
    return int(result["N"][0])


def copied_bytes(server: Server, model: str) -> float:
    return metric(server, "shmserve_copied_bytes_total", f"model={model}")


def test_callers_at_a_time_have_lanes_to_all_instances(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    with connect(server) as client:
        x = np.zeros(10, np.float32)
        client.infer("pair", {"IN": x})
        seen: set[int] = set()
        together = threading.Barrier(4)

        def call(_: int) -> None:
            together.wait(30)
            for _ in range(50):
                result = client.infer("pair", {"IN": x})
                assert result.transport == "lane"
                seen.add(int(result["PID"][0]))

        list(threads.map(call, range(4)))
        assert seen == set(server.pids("executor pair"))


def test_a_model_without_lanes_is_asked_over_http(server: Server) -> None:
    """A traced model, for instance, gets no lanes, and its open lanes end."""
    x = np.zeros(10, np.float32)
    path = "/v2/models/echo/trace/setting"
    with connect(server) as client:
        client.infer("echo", {"IN": x})
        assert client.infer("echo", {"IN": x}).transport == "lane"
        level = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        assert server.request("POST", path, json.dumps(level))[0] == 200

        def way() -> str:
            return client.infer("echo", {"IN": x}).transport

        wait_until(lambda: way() == "http", "a traced model has a lane")
        assert (
            server.request("POST", path, json.dumps({"trace_level": None, "trace_rate": None}))[0]
            == 200
        )
        wait_until(lambda: way() == "lane", "no lane when it is over")


def test_lanes_are_limited_and_come_back(server: Server, program: Program) -> None:
    lanes = [program.lane("echo") for _ in range(9)]  # one user may have 3/4 of max_lanes
    for lane in lanes:  # so the executor has all descriptors
        assert lane.ask(request(1, floats(1))).status == 200
    reply, fds = program.ask(control.OpenLane("echo"))
    assert isinstance(reply, control.Failed)
    assert reply.code == "RESOURCE_EXHAUSTED"
    assert fds == []
    with connect(server) as client:
        client.infer("echo", {"IN": np.zeros(3, np.float32)})
        assert client.infer("echo", {"IN": np.zeros(3, np.float32)}).transport == "http"
    (pid,) = server.pids("executor echo")
    many = open_fds(pid)
    for lane in lanes:
        lane.close()
    # Memory of the client above may still be about to go
    wait_until(lambda: open_fds(pid) <= many - 9, "the executor keeps lanes that have ended")
    with program.lane("echo") as lane:
        assert lane.ask(request(1, floats(1))).status == 200


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (control.OpenLane("nope"), "NOT_FOUND"),
        (control.OpenLane("echo", "7"), "NOT_FOUND"),
        (control.OpenLane("echo\0"), "NOT_FOUND"),
    ],
)
def test_there_is_no_lane_to_what_is_not_there(
    program: Program, message: control.OpenLane, code: str
) -> None:
    reply, fds = program.ask(message)
    assert isinstance(reply, control.Failed)
    assert (reply.code, fds) == (code, [])


# ------------------------------------------------------------------- hostile messages

BIG = LaneTensor("IN", "FP32", (1024,), bytes(4096))
NOT_OURS = "Unable to find shared memory region: 'nobody-s'"
REFUSED: dict[str, tuple[tuple[LaneTensor, ...], dict[str, Any], int, str]] = {
    "no input": ((), {}, 400, "missing required input(s) ['IN']"),
    "unknown input": ((floats(1, name="X"),), {}, 400, "unexpected inference input 'X'"),
    "twice": ((floats(1), floats(1)), {}, 400, "input 'IN' already exists"),
    "datatype": ((LaneTensor("IN", "INT8", (4,), b"abcd"),), {}, 400, "data-type is 'INT8'"),
    "no datatype": ((LaneTensor("IN", "X", (4,), b"abcd"),), {}, 400, "invalid datatype 'X'"),
    "rank": ((LaneTensor("IN", "FP32", (1, 1), b"abcd"),), {}, 400, "unexpected shape"),
    "size": ((LaneTensor("IN", "FP32", (2,), b"abcd"),), {}, 400, "Expected 8, got 4"),
    "negative": ((LaneTensor("IN", "FP32", (-1,), b""),), {}, 400, "negative"),
    "endless": ((LaneTensor("IN", "FP32", (1 << 63,), b""),), {}, 400, "total element count"),
    "nowhere": ((LaneTensor("IN", "FP32", (1,), None),), {}, 400, "has no bytes"),
    "too large": ((BIG,), {}, 400, "must lie in a registered region"),
    "no region": ((in_region("nobody-s", 1),), {}, 404, NOT_OURS),
    "behind": ((in_region("mine", 1, 4096),), {}, 400, "Invalid offset"),
    "before": ((in_region("mine", 1, -4),), {}, 400, "Invalid offset"),
    "across": ((in_region("mine", 2, 4092),), {}, 400, "Invalid offset + byte size"),
    "window": ((in_region("mine", 2, 0, 4),), {}, 400, "Expected 8, got 4"),
    "output": ((floats(1),), {"outputs": (LaneOutput("X"),)}, 400, "unexpected inference output"),
    "outputs": ((floats(1),), {"outputs": (LaneOutput("OUT"),) * 2}, 400, "Duplicate output"),
    "place": (
        *((floats(1),), {"outputs": (LaneOutput("OUT", LaneWindow("nobody-s", 0, 4)),)}),
        *(404, NOT_OURS),
    ),
    "small place": (
        *((floats(1, 2),), {"outputs": (LaneOutput("OUT", LaneWindow("mine", 0, 4)),)}),
        *(400, "should be at least"),
    ),
    "parameter": ((floats(1),), {"parameters": {"triton_x": 1}}, 400, "triton_"),
    "time": ((floats(1),), {"timeout_ns": -1}, 400, "negative"),
}


def test_every_check_of_a_frontend_is_made(server: Server, program: Program) -> None:
    program.region("mine", 4096)
    before = counts(server, "echo")
    with program.lane("echo") as lane:
        for number, (what, (inputs, more, status, words)) in enumerate(REFUSED.items()):
            answer = lane.ask(request(number, *inputs, **more))
            assert (answer.number, answer.status, answer.outputs) == (number, status, ()), what
            assert words in answer.error, what
        assert lane.ask(request(99, floats(7))).outputs[0].at == np.float32(7).tobytes()
    assert counts(server, "echo")[0] == before[0] + 1


def test_bytes_are_parsed_like_a_frontend_s(program: Program) -> None:
    with program.lane("misbehaving") as lane:
        for number, data in enumerate((b"\xff\xff\xff\xff", b"\4\0\0\0ab", b"", b"\0")):
            tensor = LaneTensor("COMMAND", "BYTES", (1,), data)
            answer = lane.ask(request(number, tensor))
            assert answer.status == 400, data
            assert "COMMAND" in answer.error
        assert lane.ask(command("throw")).status == 500
        big = lane.ask(command("ok:1024"))
        assert (big.status, big.outputs) == (400, ())
        assert "no window of shared memory" in big.error
        assert lane.ask(command("ok:1000")).status == 200


MALFORMED: dict[str, bytes] = {
    "no message": b"\xc1",
    "nested": b"\x91" * 5000,
    "another message": control.encode(control.ClientHello(1)),
    "an answer": wire.encode(wire.LaneAnswer(1)),
    "cut": wire.encode(request(1, floats(1)))[:-3],
    "too long": wire.encode(request(1, LaneTensor("IN", "FP32", (1,), bytes(140_000)))),
    "descriptors": b"",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_nonsense_ends_its_lane_alone(server: Server, program: Program, what: str) -> None:
    (pid,) = server.pids("executor misbehaving")
    with program.lane("misbehaving") as first:  # for which the flight recorder opens its file
        first.send(b"\xc1")
        assert first.ended()
    with program.lane("misbehaving") as other, program.lane("misbehaving") as lane:
        assert other.ask(command("ok")).status == lane.ask(command("ok")).status == 200
        many = open_fds(pid)
        if what == "descriptors":
            try:
                lane.send(wire.encode(command("ok")), [0])
            except PermissionError:  # since Linux 6.16
                lane.send(b"")
        else:
            lane.send(MALFORMED[what])
        assert lane.ended()
        assert other.ask(command("ok")).status == 200
        wait_until(lambda: open_fds(pid) < many, "its descriptor is left")


def test_regions_that_go_meanwhile(program: Program) -> None:
    memory = program.region("mine", 8192)
    memory[:4096].view("<f4")[:] = 7
    place = (LaneOutput("OUT", LaneWindow("mine", 4096, 4096)),)
    with program.lane("echo") as lane:
        answer = lane.ask(request(1, in_region("mine", 1024), outputs=place))
        assert (answer.status, answer.outputs[0].at) == (200, None)
        assert memory[4096:].view("<f4").tolist() == [7] * 1024
        program.ask(control.Unregister(("mine",)))
        answer = lane.ask(request(2, in_region("mine", 1024), outputs=place))
        assert (answer.status, answer.code) == (404, "NOT_FOUND")


def test_a_file_that_is_cut_costs_its_own_request(server: Server, program: Program) -> None:
    name = f"lane-cut-{os.getpid()}"
    path = f"/dev/shm/{name}"
    try:
        with open(path, "wb") as file:
            file.truncate(1 << 20)
        body = {"key": f"/{name}", "offset": 0, "byte_size": 1 << 20}
        url = f"/v2/systemsharedmemory/region/{name}"
        assert server.request("POST", f"{url}/register", json.dumps(body))[0] == 200
        count = (1 << 19) // 4
        place = (LaneOutput("OUT", LaneWindow(name, 1 << 19, 1 << 19)),)
        with program.lane("echo") as lane:
            assert lane.ask(request(1, in_region(name, count), outputs=place)).status == 200
            os.truncate(path, 4096)
            answer = lane.ask(request(2, in_region(name, count), outputs=place))
            assert answer.status == 400
            assert "shared memory" in answer.error
            assert lane.ask(request(3, floats(1))).status == 200
    finally:
        os.unlink(path)
        server.request("POST", f"/v2/systemsharedmemory/region/{name}/unregister")


# ------------------------------------------------------------------------ floods and deaths


def test_a_flood_is_read_no_faster_than_it_is_answered(server: Server, program: Program) -> None:
    """The executor stops reading from a client that reads no answers, serves other clients
    meanwhile, and finally closes the lane."""
    lane = program.lane("echo")
    data = wire.encode(request(0, floats(*range(1000))))
    lane.sock.settimeout(0.2)
    sent = _send_until_full(lane)
    assert sent * len(data) < 2 << 20, "what is not read is bounded by the sockets"
    with program.lane("echo") as other:
        assert other.ask(request(1, floats(5))).status == 200
    poll = select.poll()
    poll.register(lane.sock, 0)
    numbers = itertools.count(sent)

    def closed() -> bool:
        with contextlib.suppress(OSError):  # after a slow turn of the executor, messages fit again
            lane.send(request(next(numbers), floats(*range(1000))))
        return bool(poll.poll(0))

    wait_until(closed, "a reader that stalls longer than send_timeout_s")
    lane.close()


def _send_until_full(lane: RawLane) -> int:
    for number in range(100_000):
        try:
            lane.send(request(number, floats(*range(1000))))
        except TimeoutError:
            return number
    raise AssertionError("it takes everything")


def test_programs_that_die_with_every_message(server: Server, program: Program) -> None:
    (pid,) = server.pids("executor misbehaving")
    with program.lane("misbehaving") as lane:
        assert lane.ask(command("ok")).status == 200
        many = open_fds(pid)
        for words in ("ok", "sleep:0.05", "throw", "ok:900"):
            for count in range(3):
                with program.lane("misbehaving") as dying:
                    for number in range(count):
                        dying.send(command(words, number))
        # with `lane`, all lanes that one user may have
        others = [program.lane("misbehaving") for _ in range(8)]
        for other in others:
            assert other.ask(command("ok")).status == 200
            other.close()
        wait_until(lambda: open_fds(pid) <= many, "a lane is left")
        assert lane.ask(command("ok")).status == 200


# --------------------------------------------------------------- executors that come and go


@pytest.fixture
def own() -> Iterator[Server]:
    with Server(MODELS, **SETTINGS) as server:
        server.wait_instances()
        yield server


def test_executors_die_move_and_end(own: Server, threads: ThreadPoolExecutor) -> None:
    x = np.arange(5, dtype=np.float32)
    with connect(own) as client, Program(own.run_dir) as program:
        client.infer("pair", {"IN": x})
        _killed(own, client, x, threads)
        _reloaded(own, client, x, threads)
        _streaming(own, client)
        _without_coordinator(own, client, program)
    with Program(own.run_dir) as program:
        lane = program.lane("misbehaving")
        lane.send(command("sleep:0.5"))
        own.stop()
        assert lane.receive().status == 200, "what was accepted is answered"
        assert lane.ended()
        lane.close()


def _killed(own: Server, client: Client, x: Any, threads: ThreadPoolExecutor) -> None:
    """A request to a retryable model runs again elsewhere, unless the request names memory."""
    for _ in range(4):
        assert client.infer("pair", {"IN": x}).transport == "lane"
    victim = int(client.infer("pair", {"IN": x})["PID"][0])
    os.kill(victim, signal.SIGSTOP)
    asked = threads.submit(client.infer, "pair", {"IN": x})
    wait([asked], 0.3)
    os.kill(victim, signal.SIGKILL)
    assert asked.result()["PID"][0] != victim
    own.wait_instances()


def _reloaded(own: Server, client: Client, x: Any, threads: ThreadPoolExecutor) -> None:
    """No request fails while a model is loaded anew, and its lanes go to the new executors."""
    before = set(own.pids("executor pair"))
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            client.infer("pair", {"IN": x})

    clients = [threads.submit(ask) for _ in range(2)]
    config = own.get("/v2/models/pair/config")[1]
    assert own.request("POST", "/v2/repository/models/pair/load", _again(config))[0] == 200
    wait_until(lambda: not before & set(own.pids("executor pair")), "the old ones are still there")
    over.set()
    for asking in clients:
        asking.result()
    result = client.infer("pair", {"IN": x})
    assert result.transport == "lane"
    assert int(result["PID"][0]) not in before


def _streaming(own: Server, client: Client) -> None:
    """Killed in mid-stream, loaded anew in mid-stream."""
    pid = number_of(client, "pid")
    with client.stream("teller", told("big:1000000")) as stream:
        next(stream)
        os.kill(pid, signal.SIGKILL)
        with inference_error(502, "died while it had the request"):
            list(stream)
    wait_until(lambda: own.pids("executor teller") not in ([], [pid]), "no new executor")
    own.wait_instances()
    with client.stream("teller", told("slowly:40"), ["N"]) as stream:
        first = next(stream)
        config = own.get("/v2/models/teller/config")[1]
        assert own.request("POST", "/v2/repository/models/teller/load", _again(config))[0] == 200
        assert len(list(stream)) == 39, "it goes on where it was begun"
    assert first.transport == "lane"
    old = number_of(client, "pid")
    stream = client.stream("teller", told("slowly:20"))
    next(stream)
    assert old == number_of(client, "pid")
    stream.close()


def _again(document: dict[str, Any]) -> str:
    """Return a load request with a changed configuration, so that the model is loaded anew."""
    document["parameters"] = {**document.get("parameters", {}), "x": {"string_value": "1"}}
    return json.dumps({"parameters": {"config": json.dumps(document)}})


def _without_coordinator(own: Server, client: Client, program: Program) -> None:
    """Lanes work without a coordinator. The next coordinator knows the lanes and their counts."""
    lanes: list[RawLane] = [program.lane("echo") for _ in range(8)]
    assert lanes[0].ask(request(1, floats(1))).status == 200
    (pid,) = own.pids("coordinator")
    os.kill(pid, signal.SIGKILL)
    assert lanes[0].ask(request(1, floats(1))).status == 200
    wait_until(lambda: own.pids("coordinator") not in ([], [pid]), "no coordinator")
    own.wait_linked()
    # Executors report lanes before the lanes' counts
    wait_until(lambda: counts(own, "echo")[0] == 2, "the lanes' counts")
    with Program(own.run_dir) as again:
        replies = [again.ask(control.OpenLane("echo")) for _ in range(2)]
        assert isinstance(replies[0][0], control.LaneOpened)
        assert isinstance(replies[1][0], control.Failed), "nine of them are all for one user"
        for _, fds in replies:
            for fd in fds:
                os.close(fd)
    for lane in lanes:
        lane.close()
