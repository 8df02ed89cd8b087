"""Streams over HTTP: real models in real processes, readers of every kind."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmserve import config
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.tensor import bytes_codec
from tests.running_server import rss_bytes, wait_until
from tests.servers import SMALL, Server, served

MODELS = Path(__file__).parents[1] / "repositories" / "streams"
CREDIT = 4
STREAM = "/v2/models/teller/generate_stream"
shared = served(MODELS, stream_credit=CREDIT, **SMALL)


def events(body: bytes) -> list[dict[str, Any]]:
    found = []
    for event in body.decode().split("\n\n"):
        if event:
            assert event.startswith("data: ")
            found.append(json.loads(event.removeprefix("data: ")))
    return found


def ask(server: Server, command: str) -> list[dict[str, Any]]:
    body = json.dumps({"COMMAND": command}).encode()
    status, headers, answer = server.request("POST", STREAM, body)
    assert status == 200, answer
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer)


def number(server: Server, command: str) -> int:
    body = json.dumps({"COMMAND": command}).encode()
    status, headers, answer = server.request("POST", "/v2/models/teller/generate", body)
    assert status == 200, answer
    assert headers["content-type"] == "application/json"
    return int(json.loads(answer)["N"])


class Reader:
    """Client that decides when to read."""

    def __init__(self, server: Server, command: str, version: str = "1.1") -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(60)
        self.sock.connect((server.http_host, server.http_port))
        body = json.dumps({"COMMAND": command}).encode()
        fields = f"Host: localhost\r\nContent-Length: {len(body)}"
        head = f"POST {STREAM} HTTP/{version}\r\n{fields}\r\n\r\n"
        self.sock.sendall(head.encode() + body)
        self.seen = b""

    def until(self, what: bytes) -> bytes:
        while what not in self.seen:
            data = self.sock.recv(65536)
            assert data, f"the stream ended before {what!r}: {self.seen[-300:]!r}"
            self.seen += data
        return self.seen

    def rest(self) -> bytes:
        while data := self.sock.recv(1 << 20):
            self.seen += data
        return self.seen

    def close(self) -> None:
        self.sock.close()


def slots(server: Server) -> int:
    return len(server.show("slots"))


def settled(server: Server) -> bool:
    return slots(server) == 0


@pytest.mark.parametrize("command", ["count", "in_thread"])
@pytest.mark.parametrize("count", [0, 1, 5, 10_000])
def test_every_answer_arrives_in_order(shared: Server, command: str, count: int) -> None:
    assert [event["N"] for event in ask(shared, f"{command}:{count}")] == list(range(count))


def test_many_streams_at_once(shared: Server, threads: ThreadPoolExecutor) -> None:
    results = threads.map(ask, [shared] * 8, ["slowly:20"] * 8)
    assert [[event["N"] for event in result] for result in results] == [list(range(20))] * 8


def test_a_reader_that_stops_reading_holds_back_the_model(shared: Server) -> None:
    executor = shared.pids("executor")[0]
    before = rss_bytes(executor)
    reader = Reader(shared, "big:1000000")
    reader.until(b'"N":1,')
    time.sleep(1)  # the model could send a thousand answers in this second

    def held() -> int:
        return sum(row.get("bytes") == 1 << 20 for row in shared.show("slots"))

    wait_until(lambda: held() > 0, "answers that wait")
    assert held() <= CREDIT + 1
    assert rss_bytes(executor) - before < 64 << 20
    cancelled = number(shared, "told")  # other clients are served meanwhile
    reader.close()
    wait_until(lambda: number(shared, "told") == cancelled + 1, "the model was not told")
    wait_until(lambda: settled(shared), "slots are held")


def test_a_reader_that_vanishes_is_told_to_the_model(shared: Server) -> None:
    cancelled = number(shared, "told")
    reader = Reader(shared, "slowly:1000000")
    reader.until(b'"N":3')
    reader.close()
    wait_until(lambda: number(shared, "told") == cancelled + 1, "the model was not told")
    wait_until(lambda: settled(shared), "slots are held")


@pytest.mark.parametrize(
    ("command", "numbers", "error"),
    [
        ("forget:3", [0, 1, 2], "without sending its final response"),
        ("throw:3", [0, 1, 2], "no such luck in <path>"),
    ],
)
def test_a_stream_that_does_not_end_well(
    shared: Server, command: str, numbers: list[int], error: str
) -> None:
    *answers, last = ask(shared, command)
    assert [answer["N"] for answer in answers] == numbers
    assert error in last["error"]
    wait_until(lambda: settled(shared), "slots are held")


def test_an_error_among_answers(shared: Server) -> None:
    first, error, last = ask(shared, "error")
    assert first["N"] == 0
    assert error == {"error": "number 1 is missing"}
    assert last["N"] == 2


@pytest.mark.parametrize("command", ["forget:0", "throw:0"])
def test_what_fails_before_the_first_answer_has_a_status(shared: Server, command: str) -> None:
    body = json.dumps({"COMMAND": command}).encode()
    status, headers, answer = shared.request("POST", STREAM, body)
    assert status == 500
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [list(event) for event in events(answer)] == [["error"]]


def test_http_1_0_ends_with_the_connection(shared: Server) -> None:
    reader = Reader(shared, "count:3", "1.0")
    head, _, body = reader.rest().partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert [event["N"] for event in events(body)] == [0, 1, 2]
    reader.close()


def test_answers_may_go_into_client_memory(shared: Server) -> None:
    """Each answer is written to the same place, as in Triton. Only gRPC allows such requests."""
    name = f"shmserve-test-{os.getpid()}"
    memory = Path("/dev/shm") / name
    memory.write_bytes(bytes(4096))
    settings = config.load({"SHMSERVE_RUN_DIR": shared.run_dir})
    dispatcher = Dispatcher(settings)
    dispatcher.start()
    region = f"/v2/systemsharedmemory/region/{name}"
    try:
        body = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": 4096}).encode()
        assert shared.request("POST", f"{region}/register", body)[0] == 200
        (found,) = dispatcher.snapshot().regions.values()
        options = RunOptions(places=(OutputPlace("N", RegionRef(found.number, 64, 8)),))
        command = bytes_codec.encode([b"count:9"])
        with dispatcher.call(dispatcher.ready_model("teller"), options) as call:
            reservation = call.reserve(len(command))
            reservation.view[:] = command
            call.add_input("COMMAND", "BYTES", (1,), reservation)
            outcomes = list(call.stream())
            assert call.receipt.copied_out == 9 * 8
        assert [len(outcome.outputs) for outcome in outcomes] == [1] * 9 + [0]
        written = memory.read_bytes()
        assert written[64:72] == (8).to_bytes(8, "little")
        assert written[:64] + written[72:] == bytes(4096 - 8)
    finally:
        shared.request("POST", f"{region}/unregister", b"")
        dispatcher.close()
        memory.unlink()
    wait_until(lambda: settled(shared), "slots are held")


def test_the_executor_is_killed_in_mid_stream() -> None:
    with Server(MODELS, **SMALL) as server:
        pid = number(server, "pid")
        reader = Reader(server, "slowly:1000000")
        reader.until(b'"N":3')
        os.kill(pid, signal.SIGKILL)
        reader.until(b"died while it had the request")
        reader.until(b"0\r\n\r\n")  # an orderly end
        reader.close()
        wait_until(lambda: bool(set(server.pids("executor")) - {pid}), "no new executor")
        server.wait_instances()
        assert number(server, "pid") != pid
        assert len(ask(server, "count:10")) == 10
        wait_until(lambda: settled(server), "slots are held")


def test_the_http_worker_is_killed_in_mid_stream() -> None:
    with Server(MODELS, **SMALL) as server:
        reader = Reader(server, "big:1000000")
        reader.until(b'"N":1,')
        os.kill(server.pids("http worker")[0], signal.SIGKILL)
        wait_until(server.ready, "not ready")
        wait_until(lambda: number(server, "told") == 1, "the model was not told")
        wait_until(lambda: settled(server), "slots are held")
        reader.close()


def test_accepted_streams_end_before_the_service_does() -> None:
    with Server(MODELS, **SMALL, drain_timeout_s=60) as server:
        reader = Reader(server, "slowly:60")
        reader.until(b'"N":3')
        assert server.master is not None
        server.master.terminate()
        reader.until(b'"N":59')
        reader.until(b"0\r\n\r\n")
        reader.close()
        server.stop()


def test_the_watchdog_knows_long_streams_from_stuck_ones() -> None:
    with Server(
        MODELS, **SMALL, execute_timeout_s=3, request_timeout_s=60, stream_credit=CREDIT
    ) as server:
        pid = number(server, "pid")
        slow = Reader(server, "big:1000000")  # the client does not read: not the model's fault
        slow.until(b'"N":1,')
        assert len(ask(server, "slowly:90")) == 90  # much longer than execute_timeout_s
        slow.close()
        wait_until(lambda: number(server, "told") == 1, "the model was not told")
        assert number(server, "pid") == pid
        body = json.dumps({"COMMAND": "silent"}).encode()
        status, _, answer = server.request("POST", STREAM, body)
        assert status == 502, answer
        wait_until(lambda: bool(set(server.pids("executor")) - {pid}), "no new executor")


def test_a_plain_gthread_run_streams_too() -> None:
    gthread = ("-k", "gthread", "--threads", "4")
    with Server(MODELS, **SMALL, gunicorn=gthread) as server:
        assert [event["N"] for event in ask(server, "in_thread:500")] == list(range(500))
        assert number(server, "told") == 0
        reader = Reader(server, "slowly:1000000")
        reader.until(b'"N":3')
        reader.close()
        wait_until(lambda: number(server, "told") == 1, "the model was not told")
        wait_until(lambda: settled(server), "slots are held")
