"""The connection worker in a real gunicorn, spoken to over raw sockets."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmserve.frontends.caller_numbers import IN_ENVIRON, of_host
from tests import running_server
from tests.running_server import free_port
from tests.servers import completed

ROOT = Path(__file__).resolve().parents[2]
APPS = str(ROOT / "tests/apps")
WORKER = "shmserve.frontends.http.server.worker.ConnectionWorker"
GUNICORN = (sys.executable, "-m", "gunicorn", "-c", f"{APPS}/gunicorn.conf.py", "-k", WORKER,
            "--no-control-socket", "--chdir", str(ROOT), "--pythonpath", APPS)  # fmt: skip
WATCHDOG_S = 60.0
GET = b"GET %s HTTP/1.1\r\nHost: test\r\n\r\n"


class Server:
    """Gunicorn with one worker on a Unix socket and a TCP port."""

    def __init__(self, directory: Path, settings: dict[str, str], *options: str) -> None:
        self.path = str(directory / "http.sock")
        self.port = free_port()
        self.log = directory / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ |= {f"SHMSERVE_{name.upper()}": value for name, value in settings.items()}
        command = [*GUNICORN, "-b", f"unix:{self.path}", "-b", f"127.0.0.1:{self.port}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options, "http_worker_app"], stdout=log, stderr=log, env=environ
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with self.connect() as sock:
                sock.sendall(GET % b"/info")
                return bool(sock.recv(1))
        except OSError:
            return False

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), WATCHDOG_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def request(self, head: bytes, body: bytes = b"") -> Answer:
        with self.connect() as sock:
            return ask(sock, head + body)

    def info(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.request(GET % b"/info").body)
        return told

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WATCHDOG_S)


class Answer:
    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.head = head
        self.status = int(first.split()[1])
        self.fields = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        self.body = body


def receive(sock: socket.socket, method: str = "GET") -> Answer:
    """Read exactly one answer and no byte beyond."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        assert byte, f"closed after {head!r}"
        head += byte
    answer = Answer(head[:-4], b"")
    if method == "HEAD" or answer.status in (100, 204):
        return answer
    if answer.fields.get("transfer-encoding") == "chunked":
        answer.body = b"".join(read_chunks(sock))
    else:
        answer.body = exactly(sock, int(answer.fields["content-length"]))
    return answer


def ask(sock: socket.socket, request: bytes) -> Answer:
    sock.sendall(request)
    return receive(sock)


def exactly(sock: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        piece = sock.recv(min(size - len(body), 1 << 20))
        assert piece, f"closed after {len(body)} of {size} bytes"
        body += piece
    return bytes(body)


def read_chunks(sock: socket.socket) -> Iterator[bytes]:
    while True:
        line = b""
        while not line.endswith(b"\r\n"):
            line += exactly(sock, 1)
        size = int(line, 16)
        yield exactly(sock, size)
        assert exactly(sock, 2) == b"\r\n"
        if not size:
            return


def rest(sock: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def ended(sock: socket.socket) -> bool:
    """Return True once the server has closed the connection."""
    rest(sock)
    return True


wait_until = functools.partial(running_server.wait_until, what="the state that the test needs")


def post(path: bytes, body: bytes, *fields: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: test", *fields]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    server = Server(directory, {"max_request_bytes": str(1 << 26)})
    yield server
    server.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str, **settings: str) -> Server:
        servers.append(Server(tmp_path, settings, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


# Framing


def test_a_byte_out_of_band_is_an_ordinary_byte(server: Server) -> None:
    """On a Unix socket, a peek that leaves such a byte out would find input for ever."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG_S)
        sock.connect(server.path)
        sock.sendall((GET % b"/info")[:-1])
        try:
            sock.send(b"\n", socket.MSG_OOB)
        except OSError:
            pytest.skip("the kernel has no AF_UNIX_OOB")
        assert receive(sock).status == 200


def test_answers_pipelined_requests_in_order(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(post(b"/", b"first") + GET % b"/ignore" + post(b"/", b"third"))
        assert [receive(sock).body for _ in range(3)] == [b"first", b"ignored", b"third"]


def test_answers_pipelined_requests_after_a_chunked_one(server: Server) -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    large = os.urandom(100_000)
    with server.connect() as sock:
        sock.sendall(
            chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + post(b"/", large) + GET % b"/ignore"
        )
        assert [receive(sock).body for _ in range(3)] == [b"abcde", large, b"ignored"]


def test_after_small_requests_there_may_come_any(server: Server) -> None:
    """The worker reads all available bytes at once: more or less than one request."""
    large, small = os.urandom(100_000), post(b"/", b"small")
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    bursts: list[tuple[list[bytes], list[bytes]]] = [
        ([small + small], [b"small", b"small"]),
        ([post(b"/", large)], [large]),
        ([post(b"/", large) + small], [large, b"small"]),
        ([small + post(b"/", large)], [b"small", large]),
        ([chunked + b"3\r\nabc\r\n0\r\n\r\n" + small], [b"abc", b"small"]),
        ([small[:20], small[20:]], [b"small"]),
        ([small[:-2], small[-2:]], [b"small"]),
        ([GET % b"/ignore" + small], [b"ignored", b"small"]),
    ]
    with server.connect() as sock:
        for pieces, bodies in bursts:
            for _ in range(10):
                assert ask(sock, small).body == b"small"
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(0.05)
            assert [receive(sock).body for _ in bodies] == bodies


@pytest.mark.parametrize("size", [0, 1, 4096, 8000, 8192, 9000, 1 << 20, (1 << 24) + 3])
def test_readinto_receives_exactly_the_body(server: Server, size: int) -> None:
    body = os.urandom(size)
    with server.connect() as sock:
        for _ in range(2):
            told = json.loads(ask(sock, post(b"/digest", body)).body)
            assert told["got"] == size
            assert told["sha"] == hashlib.sha256(body).hexdigest()
            assert not told["failed"]
            if size >= 8192:
                assert told["copied"] == 0


def test_large_body_after_a_small_one_is_not_copied(server: Server) -> None:
    small, large = post(b"/digest", b"x" * 100), post(b"/digest", b"y" * 100_000)
    with server.connect() as sock:
        sock.sendall(small + large + small)
        told = [json.loads(receive(sock).body) for _ in range(3)]
    assert [each["got"] for each in told] == [100, 100_000, 100]
    assert told[1]["copied"] == 0


def test_read_then_readinto(server: Server) -> None:
    body = os.urandom(50_000)
    told = json.loads(server.request(post(b"/digest", body, b"X-First: 123")).body)
    assert told["sha"] == hashlib.sha256(body).hexdigest()
    assert told["copied"] == 0


def test_chunked_body_is_read_into_memory_and_counted(server: Server) -> None:
    body = os.urandom(30_000)
    chunks = b"".join(b"%x\r\n%s\r\n" % (10_000, body[i : i + 10_000]) for i in (0, 10000, 20000))
    head = (
        b"POST /digest HTTP/1.1\r\nHost: x\r\nX-Size: 30000\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    told = json.loads(server.request(head + chunks + b"0\r\n\r\n").body)
    assert told["sha"] == hashlib.sha256(body).hexdigest()
    assert told["copied"] == 30_000


def test_too_many_chunks_end_the_connection(server: Server) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        assert ask(sock, head + b"1\r\nx\r\n" * 65536 + b"0\r\n\r\n").body == b"x" * 65536
        # this application handles no errors
        assert ask(sock, head + b"1\r\nx\r\n" * 65537 + b"0\r\n\r\n").status == 500
        assert ended(sock)


def test_body_in_small_pieces(server: Server) -> None:
    body = os.urandom(3000)
    request = post(b"/digest", body)
    with server.connect() as sock:
        for start in range(0, len(request), 100):
            sock.sendall(request[start : start + 100])
            time.sleep(0.001)
        told = json.loads(receive(sock).body)
    assert told["sha"] == hashlib.sha256(body).hexdigest()


def test_continue_is_sent_when_the_body_is_read(server: Server) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    with server.connect() as sock:
        assert ask(sock, head % b"/").status == 100
        assert ask(sock, b"hello").body == b"hello"
        sock.sendall(head % b"/" + b"again")  # did not wait: no 100 needed
        assert receive(sock).body == b"again"
        assert ask(sock, head % b"/ignore").body == b"ignored"
        assert ended(sock)


@pytest.mark.parametrize(
    ("path", "size", "stays"), [(b"/ignore", 500_000, True), (b"/ignore", 3_000_000, False)]
)
def test_unread_body_is_drained_or_the_connection_ends(
    server: Server, path: bytes, size: int, stays: bool
) -> None:
    with server.connect() as sock:
        assert ask(sock, post(path, b"x" * size)).body == b"ignored"
        if stays:
            assert ask(sock, GET % path).body == b"ignored"
        else:
            assert ended(sock)


@pytest.mark.parametrize(
    ("request_bytes", "stays"),
    [
        (b"GET /ignore HTTP/1.0\r\n\r\n", False),
        (b"GET /ignore HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"GET /ignore HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET /ignore HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False),
    ],
)
def test_keep_alive(server: Server, request_bytes: bytes, stays: bool) -> None:
    with server.connect() as sock:
        answer = ask(sock, request_bytes)
        if stays:
            assert ask(sock, request_bytes).body == b"ignored"
            assert answer.fields.get("connection") != "close"
        else:
            assert ended(sock)
            assert answer.fields["connection"] == "close"


def test_head_and_no_content_have_no_body(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(b"HEAD /big?100000 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = receive(sock, "HEAD")
        assert (answer.status, answer.fields["content-length"]) == (200, "100008")
        answer = ask(sock, GET % b"/nothing")
        assert (answer.status, answer.fields.get("content-length")) == (204, None)
        assert ask(sock, GET % b"/ignore").body == b"ignored"


def test_stream_is_chunked_for_1_1_and_ends_with_the_connection_for_1_0(server: Server) -> None:
    with server.connect() as sock:
        assert ask(sock, GET % b"/stream").body == b"onetwothree"
        sock.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
        assert rest(sock).endswith(b"\r\n\r\nonetwothree")


# Refusals


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/2.5\r\n\r\n", 505),
        (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 9000), 414),
        (b"G" * 100_000, 414),
        (b"GET / HTTP/1.1\r\nX: %s\r\n\r\n" % (b"x" * 9000), 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: yyyyyyyyyyyyyyy\r\n" * 9000, 431),
        (b"GET / HTTP/1.1\r\nBad Name: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: what\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nExpect: wonders\r\nContent-Length: 0\r\n\r\n", 417),
        (b"POST / HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n", 413),
        (GET % b"/broken", 500),
        (GET % b"/inject", 500),
    ],
)
def test_refusals_are_json_and_end_the_connection(
    server: Server, request_bytes: bytes, status: int
) -> None:
    with server.connect() as sock:
        answer = ask(sock, request_bytes)
        assert answer.status == status
        assert list(json.loads(answer.body)) == ["error"]
        assert answer.fields["content-type"] == "application/json"
        assert "x-injected" not in answer.fields
        assert b"secret" not in answer.body
        assert ended(sock)
    assert server.request(GET % b"/ignore").status == 200


def test_body_shorter_than_promised_ends_the_connection(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(GET % b"/short")
        assert rest(sock).endswith(b"\r\n\r\nfour")


# The environment


def test_environment(server: Server) -> None:
    head = (
        b"GET /info?a=%20b HTTP/1.1\r\nHost: example:81\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
        b"X_Under: dropped\r\nContent-Type: a/b\r\n\r\n"
    )
    told = json.loads(server.request(head).body)
    assert told["REMOTE_ADDR"] == "127.0.0.1"
    assert told["SERVER_PORT"] == str(server.port)
    assert told["HTTP_HOST"] == "example:81"
    assert told["HTTP_X_TWICE"] == "1,2"
    assert "HTTP_X_UNDER" not in told
    assert told["CONTENT_TYPE"] == "a/b"
    assert (told["PATH_INFO"], told["QUERY_STRING"]) == ("/info", "a=%20b")
    assert told["wsgi.url_scheme"] == "http"
    assert told["alive"] is True


def test_unix_socket(server: Server) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG_S)
        sock.connect(server.path)
        body = os.urandom(1 << 20)
        for _ in range(2):
            told = json.loads(ask(sock, post(b"/digest", body)).body)
            assert told["sha"] == hashlib.sha256(body).hexdigest()
            assert told["copied"] == 0
        told = json.loads(ask(sock, b"GET /info HTTP/1.1\r\nHost: example\r\n\r\n").body)
    assert (told["REMOTE_ADDR"], told["SERVER_NAME"], told["SERVER_PORT"]) == ("", "example", "80")


# Misbehaving clients


def test_client_that_vanishes_gets_its_buffers_released_once(server: Server) -> None:
    before = int(server.request(GET % b"/closed").body)
    for path in (b"/big?300000000", b"/endless", b"/big?10", b"/gone"):
        with server.connect() as sock:
            sock.sendall(GET % path)
            if path != b"/gone":
                sock.recv(1)
    wait_until(lambda: int(server.request(GET % b"/closed").body) == before + 4)
    time.sleep(0.1)
    assert int(server.request(GET % b"/closed").body) == before + 4


def test_slow_reader_gets_everything(server: Server) -> None:
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.sendall(GET % b"/big?5000000")
        time.sleep(0.5)
        answer = receive(sock)
    assert len(answer.body) == 5_000_008
    assert answer.body.endswith(b"xtail")


def test_client_that_stops_in_its_body(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(post(b"/digest", b"x" * 50_000)[:-10_000])
        sock.shutdown(socket.SHUT_WR)
        answer = receive(sock)
        told = json.loads(answer.body)
        assert told["failed"]
        assert told["got"] == 40_000
        assert answer.fields["connection"] == "close"


def test_dribbling_head_is_cut_by_the_total_deadline(start: Callable[..., Server]) -> None:
    server = start(head_timeout_s="0.5")
    with server.connect() as sock:
        dribble(sock, b"GET / HTTP/1.1\r\nX-Slow: " + b"x" * 100_000)
        answer = receive(sock)
        assert answer.status == 408
        assert "head" in json.loads(answer.body)["error"]
        assert ended(sock)


def test_dribbling_body_is_cut_by_the_total_deadline(start: Callable[..., Server]) -> None:
    server = start(body_timeout_s="0.5", min_bytes_per_s="1000000")
    with server.connect() as sock:
        sock.sendall(post(b"/digest", b"x" * 100_000)[:-100_000])
        dribble(sock, b"x" * 50_000)
        assert json.loads(receive(sock).body)["failed"]
        assert ended(sock)
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(chunked)
        dribble(sock, b"1\r\nx\r\n" * 50_000)
        receive(sock)
        assert ended(sock)


def dribble(sock: socket.socket, data: bytes) -> None:
    """Send byte for byte until the server says something."""
    for start in range(len(data)):
        try:
            sock.sendall(data[start : start + 1])
            sock.settimeout(0.02)
            sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
        except OSError:
            pass
        finally:
            sock.settimeout(WATCHDOG_S)
        return
    raise AssertionError("the server let it go on")


def test_reader_that_does_not_read_is_cut(start: Callable[..., Server]) -> None:
    server = start(send_timeout_s="0.3", min_bytes_per_s="1000000000")
    with server.connect() as sock:
        sock.sendall(GET % b"/big?100000000")
        wait_until(lambda: server.request(GET % b"/closed").body == b"1")


def test_idle_connection_is_closed(start: Callable[..., Server]) -> None:
    server = start(idle_timeout_s="0.3")
    with server.connect() as silent:
        assert ended(silent)

    def served() -> bool:
        with server.connect() as kept:
            try:
                assert ask(kept, GET % b"/ignore").body == b"ignored"
            # the test was too slow, and the connection was idle
            except (OSError, AssertionError):
                return False
            return ended(kept)

    wait_until(served)


def test_connection_limit(start: Callable[..., Server]) -> None:
    server = start(max_connections="3")
    held: list[socket.socket] = []

    def hold() -> bool:
        sock = server.connect()
        if ask(sock, GET % b"/ignore").status != 200:  # connections of the start may still count
            sock.close()
            return False
        sock.sendall(b"GET /")  # so the connection is not idle
        held.append(sock)
        return len(held) == 3

    wait_until(hold)
    with server.connect() as sock:
        answer = ask(sock, GET % b"/ignore")
        assert (answer.status, answer.fields["retry-after"]) == (503, "1")
        assert "max_connections" in json.loads(answer.body)["error"]
        assert ended(sock)
    for sock in held:
        sock.close()
    wait_until(lambda: server.request(GET % b"/ignore").status == 200)


def test_the_longest_idle_connection_gives_way(start: Callable[..., Server]) -> None:
    server = start(max_connections="3")
    time.sleep(0.5)  # connections of the start have been closed
    with server.connect() as oldest, server.connect() as second:
        for sock in (oldest, second):
            assert ask(sock, GET % b"/ignore").status == 200
        with server.connect() as silent:
            time.sleep(1.5)
            assert server.request(GET % b"/ignore").status == 200
            assert ended(oldest)
            assert ask(second, GET % b"/ignore").status == 200
            assert silent.fileno() >= 0


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_without_descriptors_says_so_and_goes_on(
    start: Callable[..., Server], idle: bool
) -> None:
    server = start()
    before = server.info()
    limit = before["fds"] + 4
    _, hard = resource.prlimit(before["pid"], resource.RLIMIT_NOFILE)
    resource.prlimit(before["pid"], resource.RLIMIT_NOFILE, (limit, hard))
    held = [server.connect() for _ in range(10)]
    for sock in held:
        sock.sendall(b"" if idle else b"GET /")
    wait_until(lambda: "No descriptor is left" in server.log.read_text())
    wait_until(lambda: asked(server) == (200 if idle else 503))
    for sock in held:
        sock.close()
    wait_until(lambda: asked(server) == 200)


def asked(server: Server) -> int:
    """Return the status of an answer, or 0 if no answer came."""
    try:
        return server.request(GET % b"/ignore").status
    except (OSError, AssertionError):
        return 0


def test_thousand_connections_leave_nothing_behind(server: Server) -> None:
    server.info()
    before = server.info()
    for number in range(1000):
        with server.connect() as sock:
            if number % 4:
                sock.sendall(GET % b"/ignore")
            if number % 4 > 1:
                assert receive(sock).status == 200
    wait_until(lambda: server.info()["fds"] <= before["fds"] + 2)
    wait_until(lambda: server.info()["threads"] <= 70)


# Stopping


def test_sigterm_finishes_what_runs_and_closes_the_rest(start: Callable[..., Server]) -> None:
    server = start()
    with server.connect() as idle, server.connect() as busy, server.connect() as next_one:
        for sock in (idle, next_one):
            ask(sock, GET % b"/ignore")
        busy.sendall(GET % b"/slow?1.5")
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        next_one.sendall(GET % b"/ignore")  # was on its way when the worker stopped
        for sock, body in ((next_one, b"ignored"), (busy, b"slow")):
            answer = receive(sock)
            assert answer.body == body
            assert answer.fields["connection"] == "close"
        assert ended(idle)
    assert server.process.wait(WATCHDOG_S) == 0


def test_sigterm_gives_up_after_the_graceful_timeout(start: Callable[..., Server]) -> None:
    server = start("--graceful-timeout", "1")
    with server.connect() as sock:
        sock.sendall(GET % b"/slow?50")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(WATCHDOG_S)
        assert ended(sock)


def test_sigquit_stops_at_once(start: Callable[..., Server]) -> None:
    server = start()
    with server.connect() as sock:
        sock.sendall(GET % b"/slow?50")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGQUIT)
        assert server.process.wait(WATCHDOG_S) == 0


def test_recycling_workers_loses_no_request(
    start: Callable[..., Server], threads: ThreadPoolExecutor
) -> None:
    server = start("--max-requests", "50", "--workers", "2")
    pids = set()

    def client(_: int) -> None:
        sock = server.connect()
        for _ in range(150):
            answer = ask(sock, GET % b"/info")
            pids.add(json.loads(answer.body)["pid"])
            if answer.fields.get("connection") == "close":
                sock.close()
                sock = server.connect()
        sock.close()

    list(threads.map(client, range(3)))
    assert len(pids) > 2


# Configuration


def test_access_log(start: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "access"
    server = start("--access-logfile", str(path))
    server.request(GET % b"/big?100")
    wait_until(lambda: '"GET /big?100 HTTP/1.1" 200 108' in path.read_text())


def test_an_early_answer_to_a_large_body_says_that_it_closes(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(
            b"POST /big?10 HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 10
        )
        answer = receive(sock)
        assert answer.status == 200
        assert answer.fields["connection"] == "close"
    with server.connect() as sock:
        sock.sendall(
            b"POST /big?10 HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n" + b"x" * 20000
        )
        assert "connection" not in receive(sock).fields
        assert ask(sock, GET % b"/big?10").status == 200


def test_gunicorns_own_tls_is_refused_with_a_reason(tmp_path: Path) -> None:
    for name in ("key", "cert"):
        (tmp_path / name).touch()
    files = ("--keyfile", tmp_path / "key", "--certfile", tmp_path / "cert")
    done = completed(*GUNICORN, "-b", "127.0.0.1:0", *files, "http_worker_app")
    assert done.returncode != 0
    assert "http_tls_cert" in done.stderr
    assert "Traceback" not in done.stderr


def test_proxy_protocol(start: Callable[..., Server]) -> None:
    server = start("--proxy-protocol", "auto")
    v2 = b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c" + bytes([1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 0, 10])
    for preface in (b"PROXY TCP4 1.2.3.4 5.6.7.8 9 10\r\n", v2):
        with server.connect() as sock:
            sock.sendall(preface + GET % b"/info" + post(b"/digest", b"x" * 100_000))
            sock.sendall(GET % b"/info")
            first, digest, later = (json.loads(receive(sock).body) for _ in range(3))
            assert digest["got"] == 100_000
            for told in (first, later):  # the proxy sends the header once per connection
                assert told["REMOTE_ADDR"] == "1.2.3.4"
                assert told[IN_ENVIRON] == of_host("1.2.3.4")


def test_connections_are_spread_over_the_workers(start: Callable[..., Server]) -> None:
    server = start("--workers", "2")
    wait_until(lambda: len({server.info()["pid"] for _ in range(5)}) == 2)
    fewest = []
    for _ in range(9):
        held = [server.connect() for _ in range(8)]
        pids = [json.loads(ask(sock, GET % b"/info").body)["pid"] for sock in held]
        for sock in held:
            sock.close()
        fewest.append(8 - max(pids.count(pid) for pid in pids))
        time.sleep(0.1)
    assert sorted(fewest)[4] >= 2, fewest  # by chance alone the median would be about 1


@pytest.mark.parametrize("seed", range(8))
def test_any_requests_in_any_pieces(server: Server, threads: ThreadPoolExecutor, seed: int) -> None:
    dice = random.Random(seed)
    bodies = [dice.randbytes(dice.choice([0, 3, 200, 7900, 8192, 30_000])) for _ in range(25)]
    stream = b"".join(as_request(dice, body) for body in bodies)
    with server.connect() as sock:
        sent = threads.submit(send_in_pieces, dice, sock, stream)
        answers = [receive(sock).body for _ in bodies]
        sent.result()
    assert answers == bodies


def as_request(dice: random.Random, body: bytes) -> bytes:
    padding = b"X-Padding: " + b"p" * dice.choice([1, 50, 3000, 8000])
    if dice.random() < 0.6:
        return post(b"/", body, padding)
    lines = [b"POST / HTTP/1.1", b"Host: x", padding, b"Transfer-Encoding: chunked", b"", b""]
    half = len(body) // 2
    chunks = [b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:half], body[half:]) if c]
    return b"\r\n".join(lines) + b"".join(chunks) + b"0\r\n\r\n"


def send_in_pieces(dice: random.Random, sock: socket.socket, stream: bytes) -> None:
    while stream:
        size = dice.choice([1, 2, 5, 100, 1000, 8192, 50_000])
        sock.sendall(stream[:size])
        stream = stream[size:]
        if dice.random() < 0.3:
            time.sleep(0.001)


def test_connections_take_no_threads(server: Server) -> None:
    before = server.info()["threads"]
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(400)]
        for sock in idle[::2]:  # half of the connections have been used before
            told = json.loads(ask(sock, GET % b"/info").body)
        assert told["threads"] == before
        assert server.request(GET % b"/big?100000").status == 200  # other clients are served
        for sock in idle:
            assert ask(sock, GET % b"/info").status == 200


def test_work_beside_the_loop_keeps_nobody_waiting(server: Server) -> None:
    with server.connect() as busy:
        busy.sendall(GET % b"/beside?3")
        for _ in range(3):
            assert server.request(GET % b"/info").status == 200
        busy.setblocking(False)
        with pytest.raises(BlockingIOError):  # the connection is still open
            busy.recv(1)
        busy.settimeout(WATCHDOG_S)
        assert receive(busy).body == b"beside"
