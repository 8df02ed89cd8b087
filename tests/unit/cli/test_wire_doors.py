"""Doors of `measure` that speak over sockets: HTTP and gRPC, and the loop that drives them."""

import functools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shmserve.cli.measuring import load_plan, load_run, wire_loop
from shmserve.cli.measuring.door import FailedRequest
from shmserve.cli.measuring.grpc_door import GrpcDoor
from shmserve.cli.measuring.http2_client import Http2Client
from shmserve.cli.measuring.http_door import HttpDoor
from shmserve.cli.measuring.measurement import Measurement
from shmserve.cli.measuring.turns import Turns
from shmserve.cli.measuring.wire_loop import WireLoop
from shmserve.client.wire.credentials import Credentials
from shmserve.errors import ConfigError
from shmserve.frontends.http2 import encode_fields, frames
from tests.grpc_client import VALUES, Rig
from tests.running_server import WATCHDOG_S

INPUTS = {"x": np.arange(4, dtype=np.int8)}
GOOD = b"HTTP/1.1 200 OK\r\ninference-header-content-length: 2\r\nContent-Length: 7\r\n\r\n{}hello"
RECEIPT = GOOD.replace(b"\r\nC", b'\r\nshmserve-receipt: {"copied_bytes": {"in": 3}}\r\nC')
CLOSE = GOOD.replace(b"\r\nC", b"\r\nConnection: close\r\nC")
BUSY = b'HTTP/1.1 503 Busy\r\nContent-Length: 16\r\n\r\n{"error":"busy"}'
Answer = Callable[[socket.socket, bytes], None]


class TinyServer:
    """Server that answers each request by a function. `requests`: what came; `connections`:
    their number."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=[sock]))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(WATCHDOG_S)
            request = b""
            try:
                while data := sock.recv(1 << 16):
                    request += data
                    head, blank, body = request.partition(b"\r\n\r\n")
                    if blank and len(body) == int(head.split(b"Content-Length: ")[1].split()[0]):
                        self.requests.append(request)
                        request = b""
                        self._answer(sock, self.requests[-1])
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WATCHDOG_S)


@contextmanager
def served(answer: Answer) -> Iterator[tuple[TinyServer, HttpDoor]]:
    server = TinyServer(answer)
    try:
        with HttpDoor(server.url + "/app", "a b", INPUTS, Credentials(key="secret")) as door:
            yield server, door
    finally:
        server.close()


def in_pieces(sock: socket.socket, _: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(RECEIPT), 9):
        sock.sendall(RECEIPT[start : start + 9])
        time.sleep(0.001)


def test_an_http_request_and_its_answer() -> None:
    with served(in_pieces) as (server, door):
        sizes: list[int] = []
        assert door.send(sizes.append, receipt=True) == {"copied_bytes": {"in": 3}}
        assert door.send(sizes.append) == {}
        assert sizes == [5, 5], "bytes of the tensors"
    asked, plain = server.requests
    assert asked.startswith(b"POST /app/v2/models/a%20b/infer HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret\r\n" in plain
    assert b"\r\nshmserve-receipt: 1\r\n" in asked
    assert b"shmserve-receipt" not in plain
    assert plain.endswith(b'"parameters":{"binary_data_output":true}}\x00\x01\x02\x03')
    assert server.connections == 1


def test_a_server_that_announces_the_end_of_a_connection_gets_a_new_one() -> None:
    with served(lambda sock, _: sock.sendall(CLOSE)) as (server, door):
        for _ in range(3):
            door.send(lambda _: None)
    assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (BUSY, "503", "busy"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "", "has no Content-Length"),
        (b"SSH-2.0-nothing\r\n\r\n", "", "is not HTTP/1.1"),
        (GOOD + b"!", "", "longer than its Content-Length"),
        (b"", "", "the server closed it"),
    ],
)
def test_http_requests_that_fail(answer: bytes, status: str, text: str) -> None:
    def reply(sock: socket.socket, _: bytes) -> None:
        sock.sendall(answer)
        if not answer:
            sock.shutdown(socket.SHUT_RDWR)

    with served(reply) as (server, door):
        for _ in range(2):
            with pytest.raises(FailedRequest, match=text) as caught:
                door.send(lambda _: None)
            assert caught.value.status == status
    assert len(server.requests) == 2
    assert server.connections == (1 if status else 2)


def test_the_loop_sends_for_all_callers_and_counts_failures() -> None:
    turn = iter(range(1 << 20))

    def reply(sock: socket.socket, _: bytes) -> None:
        sock.sendall(BUSY if next(turn) % 5 == 4 else GOOD)

    result = Measurement("http", 8)
    with served(reply) as (server, _):
        make = functools.partial(HttpDoor, server.url, "m", INPUTS, Credentials(key=""))
        load_run.run(result, make, None, WATCHDOG_S, 200, 0.0)
        assert len(server.requests) == 200 + 8 * 5
    assert len(result.samples) + result.failures.total() == 200
    assert set(result.failures) == {("503", "busy")}
    assert {sample.nbytes for sample in result.samples} == {5}
    assert result.client_cpu > 0


def test_the_loop_waits_for_planned_starts() -> None:
    result = Measurement("http", 2, open_loop=True)
    with served(lambda sock, _: sock.sendall(GOOD)) as (server, _):
        make = functools.partial(HttpDoor, server.url, "m", INPUTS, Credentials(key=""))
        load_run.run(result, make, load_plan.arrivals(100, False, -0.05), WATCHDOG_S, 20, 0.05)
        assert len(server.requests) == 2 * 5 + 5 + 20
    assert len(result.samples) == 20
    assert result.elapsed_s >= 0.19
    assert all(sample.latency_ms >= sample.late_ms >= 0 for sample in result.samples)


def test_a_late_answer_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_loop, "WAIT_S", 2.0)  # longer than other answers take
    monkeypatch.setattr(wire_loop, "_LOOK_S", 0.05)
    turn = iter(range(1 << 20))

    def reply(sock: socket.socket, _: bytes) -> None:
        if next(turn) != 12:
            sock.sendall(GOOD)

    result = Measurement("http", 2)
    with served(reply) as (server, _):
        make = functools.partial(HttpDoor, server.url, "m", INPUTS, Credentials(key=""))
        load_run.run(result, make, None, WATCHDOG_S, 30, 0.0)
    assert result.failures == {("", "the server did not answer in time"): 1}
    assert len(result.samples) == 29


def test_a_server_that_closes_an_idle_connection_loses_no_request() -> None:
    def reply(sock: socket.socket, _: bytes) -> None:
        sock.sendall(GOOD)
        if len(server.requests) > 5:
            sock.shutdown(socket.SHUT_RDWR)

    result = Measurement("http", 1, open_loop=True)
    with served(reply) as (server, _):
        make = functools.partial(HttpDoor, server.url, "m", INPUTS, Credentials(key=""))
        load_run.run(result, make, load_plan.arrivals(2, False, 0.0), WATCHDOG_S, 4, 0.0)
    assert (len(result.samples), result.failures.total()) == (4, 0)


def run_loop(result: Measurement, doors: list[HttpDoor], turns: Turns) -> None:
    start = time.perf_counter()
    WireLoop(result, doors, turns, lambda: time.perf_counter() - start).run()


def test_a_connection_that_ended_before_the_load_loses_no_request() -> None:
    def reply(sock: socket.socket, _: bytes) -> None:
        sock.sendall(GOOD)
        if len(server.requests) == 1:
            sock.shutdown(socket.SHUT_RDWR)

    result = Measurement("http", 1)
    with served(reply) as (server, door):
        door.send(lambda _: None)
        poll = select.poll()
        poll.register(door.socket, select.POLLRDHUP)
        assert poll.poll(WATCHDOG_S * 1e3)
        run_loop(result, [door], Turns(None, WATCHDOG_S, 3))
    assert (len(result.samples), result.failures.total()) == (3, 0)


def test_a_caller_that_fails_at_once_leaves_turns_to_the_others() -> None:
    refused = HttpDoor("unix:/nowhere", "m", INPUTS, Credentials(key=""))
    result = Measurement("http", 2)
    with served(lambda sock, _: sock.sendall(GOOD)) as (_, door):
        run_loop(result, [door, refused], Turns(None, 3.0, 1 << 30))
    assert result.failures
    assert len(result.samples) > 1


def test_grpc_answers_are_whole_messages() -> None:
    door = GrpcDoor("h:1", "m", INPUTS, Credentials(key=""))
    client = Http2Client()
    client.begin(b"")
    client.feed(head(grpc_status="0"))
    sizes: list[int] = []
    for content in (b"", b"\0\0\0\0\2a", b"\0\0\0\0\2abc"):
        client.content[:] = content
        with pytest.raises(FailedRequest, match="not one whole message"):
            door._check(client, sizes.append)
    client.content[:] = b"\0\0\0\0\2ab"
    door._check(client, sizes.append)
    assert sizes == [2]


def test_grpc_carries_bodies_beyond_the_windows_and_many_requests() -> None:
    large = {"INPUT0": np.ones(1 << 19, np.float32)}
    with Rig(max_request_bytes=1 << 23) as rig:
        with GrpcDoor(rig.target, "identity", large, Credentials(key="")) as door:
            sizes: list[int] = []
            for _ in range(3):
                door.send(sizes.append)
            assert min(sizes) > 1 << 21
        result = Measurement("grpc", 4)
        make = functools.partial(
            GrpcDoor, rig.target, "identity", {"INPUT0": VALUES}, Credentials(key="")
        )
        load_run.run(result, make, None, WATCHDOG_S, 100, 0.0)
    assert (len(result.samples), result.failures.total()) == (100, 0)


def test_addresses_that_are_none() -> None:
    for target, text in (("http://x", "'http://x' is no HOST:PORT"), ("u@h:1", "a server's addr")):
        with pytest.raises(ConfigError, match=f"--grpc: {text}"):
            GrpcDoor(target, "m", INPUTS, Credentials(key=""))
    with pytest.raises(ConfigError, match="--url: a server's address is"):
        HttpDoor("ftp://h", "m", INPUTS, Credentials(key=""))


def head(flags: int = frames.END_HEADERS, **fields: str) -> bytes:
    block = encode_fields(tuple((name.replace("_", "-"), text) for name, text in fields.items()))
    return frames.frame(frames.HEADERS, flags, 1, block)


def test_http2_answers_byte_by_byte() -> None:
    client = Http2Client()
    client.begin(b"")
    sent = frames.settings({frames.MAX_FRAME_SIZE: 1 << 20}) + frames.ping(b"12345678")
    sent += head(x_a="b") + frames.frame(frames.DATA, frames.PADDED, 1, b"\x02abc\0\0")
    sent += frames.frame(frames.DATA, 0, 3, b"of another stream")
    trailers = head(frames.END_STREAM, grpc_status="0", grpc_message="x" * 40)
    block = trailers[frames.HEAD_BYTES :]
    sent += frames.long_field_block(1, block, frames.END_STREAM, 16)
    client.outgoing = b""
    for n in range(len(sent)):
        assert not client.ended
        client.feed(sent[n : n + 1])
    assert client.ended
    assert not client.failure
    assert client.content == b"abc"
    assert client.fields == {"x-a": "b", "grpc-status": "0", "grpc-message": "x" * 40}
    assert client.outgoing == frames.SETTINGS_ACK + frames.ping(b"12345678", frames.ACK)


def test_http2_bodies_keep_to_the_servers_windows() -> None:
    client = Http2Client()
    client.begin(b"")
    body = memoryview(bytes(100_000))
    sizes = []
    while (size := client.data_frame(body)[1]) > 0:
        sizes.append(size)
        body = body[size:]
    assert sizes == [16_384] * 3 + [16_383], "65535 together"
    client.feed(frames.window_update(0, 10) + frames.window_update(1, 20))
    assert client.data_frame(body)[1] == 10
    client.feed(frames.window_update(0, 1 << 20) + frames.settings({4: 65_535 + 30}))
    assert client.data_frame(body)[1] == 40
    client.feed(frames.window_update(1, 1 << 20))
    frame, size = client.data_frame(body[-7:])
    assert (frame[4], size) == (frames.END_STREAM, 7)


def test_http2_requests_that_get_no_answer() -> None:
    for frame, reason, is_closing in (
        (frames.rst_stream(1, 11), "error code 11", False),
        (frames.goaway(0, 0), "took no further request", True),
        (frames.goaway(1, 0), "", True),
    ):
        client = Http2Client()
        client.begin(b"")
        client.feed(frame)
        assert reason in client.failure
        assert (client.ended, client.is_closing) == (bool(reason), is_closing)
    with pytest.raises(ConnectionError, match="does not speak HTTP/2"):
        Http2Client().feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_http2_windows_are_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmserve.cli.measuring.http2_client._ACKNOWLEDGED", 10)
    client = Http2Client()
    client.begin(b"")
    client.outgoing = b""
    client.feed(
        frames.frame(frames.DATA, 0, 9, bytes(6)) + frames.frame(frames.DATA, 0, 1, b"12345")
    )
    assert client.outgoing == frames.window_update(0, 11)
    client.feed(frames.frame(frames.DATA, 0, 1, b"67890"))
    assert client.outgoing == frames.window_update(0, 11) + frames.window_update(1, 10)
