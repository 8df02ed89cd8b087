"""Request bodies on a socket pair."""

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.config import Config
from hypothesis import given
from hypothesis import strategies as st

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge
from shmserve.frontends.http.server import chunked as chunked_bodies
from shmserve.frontends.http.server.chunked import ChunkedBody
from shmserve.frontends.http.server.head import Heads, _SocketUnreader
from shmserve.frontends.http.server.http_connection import ClientGone, HttpConnection
from shmserve.frontends.http.server.request_body import CONTINUE, PART, RequestBody
from shmserve.frontends.http.server.response import parts_of
from tests.running_server import WATCHDOG_S, wait_until


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.settings = Settings(max_request_bytes=100)
        self.watch: tuple[str, float] | None = None
        self.expired = False

    def wait(self, phase: str, seconds: float) -> None:
        self.watch = (phase, time.monotonic() + seconds)


class Request:
    limit_request_field_size = 100
    max_buffer_headers = 1000
    trailers: list[tuple[str, str]]

    def parse_headers(self, data: bytes, from_trailer: bool) -> list[tuple[str, str]]:
        assert from_trailer
        return [("X", data.decode())]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    with ours, theirs:
        yield Connection(ours), theirs


@pytest.fixture
def connection(pair):
    return pair[0]


@pytest.fixture
def client(pair):
    return pair[1]


def test_never_reads_past_the_body(connection, client) -> None:
    client.sendall(b"cdefNEXT")
    body = RequestBody(connection, 4, b"ab")
    assert body.read() == b"abcdef"
    assert body.read() == b""
    assert body.finished
    assert connection.sock.recv(10) == b"NEXT"


def test_read_in_steps(connection, client) -> None:
    client.sendall(b"cdef")
    body = RequestBody(connection, 4, b"ab")
    assert [body.read(1), body.read(3), body.read(0), body.read(None)] == [b"a", b"bcd", b"", b"ef"]


def test_readinto_counts_only_what_came_with_the_head(connection, client) -> None:
    client.sendall(b"cdef")
    body = RequestBody(connection, 4, b"ab")
    assert body.read(1) == b"a"
    memory = bytearray(8)
    assert body.readinto(memoryview(memory)) == 5
    assert memory == b"bcdef\0\0\0"
    assert body.copied == 1


def test_readinto_of_a_small_view_leaves_the_rest(connection, client) -> None:
    client.sendall(b"efgh")
    body = RequestBody(connection, 4, b"abcd")
    memory = bytearray(2)
    got = b""
    for _ in range(4):
        assert body.readinto(memoryview(memory)) == 2
        got += memory
    assert got == b"abcdefgh"
    assert body.readinto(memoryview(memory)) == 0


def test_readinto_typed_memory(connection, client) -> None:
    client.sendall(bytes(range(16)))
    memory = bytearray(16)
    assert RequestBody(connection, 16).readinto(memoryview(memory).cast("f")) == 16  # type: ignore[arg-type]
    assert memory == bytes(range(16))


def test_lines(connection, client) -> None:
    client.sendall(b"ne\ntwo\nthree")
    body = RequestBody(connection, 12, b"o")
    assert body.readline(2) == b"on"
    assert body.readline() == b"e\n"
    assert list(body) == [b"two\n", b"three"]
    assert RequestBody(connection, 0, b"a\nb\nc").readlines() == [b"a\n", b"b\n", b"c"]
    assert RequestBody(connection, 0, b"a\nb\nc").readlines(1) == [b"a\n"]


def test_client_that_stops(connection, client) -> None:
    client.sendall(b"ab")
    client.shutdown(socket.SHUT_WR)
    body = RequestBody(connection, 4)
    memory = bytearray(4)
    assert body.readinto(memoryview(memory)) == 2
    assert body.failed
    assert not body.finished
    assert connection.expired
    assert body.read() == b""
    assert not body.drain(100)


def test_deadline_is_set_while_waiting_only(connection, client) -> None:
    seen: list[object] = []

    class Spy:
        def recv_into(self, view: memoryview, size: int, flags: int) -> int:
            seen.append(connection.watch)
            return client.recv_into(view, size, flags)

    connection.sock.sendall(b"abcd")
    body = RequestBody(connection, 4)
    connection.sock, original = Spy(), connection.sock
    assert body.read(2) == b"ab"
    assert body.read(2) == b"cd"
    connection.sock = original
    assert seen[0] == seen[1] != None  # noqa: E711 (one deadline for the whole body)
    assert connection.watch is None


def test_continue_is_sent_on_the_first_read_from_the_socket(connection, client) -> None:
    body = RequestBody(connection, 4, expects=True)
    assert not body.drain(100)
    client.sendall(b"abcd")
    assert body.read(2) == b"ab"
    assert body.read() == b"cd"
    client.settimeout(0.05)
    assert client.recv(1000) == CONTINUE


def test_drain(connection, client) -> None:
    client.sendall(b"x" * 50)
    assert RequestBody(connection, 50).drain(100)
    assert not RequestBody(connection, 50).drain(0)
    assert RequestBody(connection, 0, b"abc").drain(0)


@pytest.mark.parametrize(
    ("text", "with_head"), [(b"5", 5), (b"90000", 8192), (b"-5", 0), (b"5,5", 0), (b"", 0)]
)
def test_the_json_part_of_a_large_body_is_taken_with_the_head(connection, client, text, with_head):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    if text:
        head += b"Inference-Header-Content-Length: " + text + b"\r\n"
    head += b"\r\n"
    client.sendall(head + bytes(range(250)) * 400)
    heads = Heads(connection, Config(), "", {})
    found = heads.next()
    end = min(len(head) + with_head, 8192)
    assert heads.take(found, decrypted=False) == end
    assert connection.sock.recv(1) == bytes([(end - len(head)) % 250])


def chunked(connection: Connection, expects: bool = False) -> ChunkedBody:
    return ChunkedBody(connection, Request(), _SocketUnreader(connection.sock), expects)


def test_chunked(connection, client) -> None:
    client.sendall(b"3\r\nabc\r\n2;a=b\r\nde\r\n0\r\nX: y\r\n\r\nNEXT")
    body = chunked(connection)
    memory = bytearray(4)
    assert body.readinto(memoryview(memory)) == 4
    assert body.copied == 4
    assert not body.finished
    assert body.read() == b"e"
    assert body.finished


def test_chunked_limits(connection, client, monkeypatch) -> None:
    monkeypatch.setattr(chunked_bodies, "MAX_CHUNKS", 3)
    client.sendall(b"1\r\nx\r\n" * 4)
    body = chunked(connection)
    with pytest.raises(InvalidArgument, match="more than 3 chunks") as told:
        body.read()
    assert told.value.http_status == 400
    assert body.failed
    assert body.read() == b""


def test_chunked_size_limit(connection, client) -> None:
    client.sendall(b"65\r\n" + b"x" * 101)
    with pytest.raises(TooLarge, match="max_request_bytes"):
        chunked(connection).read()


@pytest.mark.parametrize("data", [b"zz\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"\r\n", b"x" * 200])
def test_chunked_framing_errors(connection, client, data: bytes) -> None:
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)
    body = chunked(connection)
    with pytest.raises(InvalidArgument, match="chunked"):
        body.read()
    assert body.failed
    assert not body.drain(100)


def test_chunked_client_that_stops(connection, client) -> None:
    client.sendall(b"5\r\nab")
    client.shutdown(socket.SHUT_WR)
    body = chunked(connection)
    assert body.read() == b"ab"
    assert body.failed


class Watched(Connection):
    """A connection that records each deadline, in seconds from when the deadline was set."""

    def __init__(self, sock: socket.socket) -> None:
        self.limits: list[float] = []
        super().__init__(sock)
        self.settings = Settings(body_timeout_s=30.0, min_bytes_per_s=1 << 20)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "watch" and isinstance(value, tuple):
            self.limits.append(value[1] - time.monotonic())
        super().__setattr__(name, value)


@pytest.mark.parametrize("read", ["read", "readinto"])
def test_the_deadline_grows_with_what_has_come(pair, client, read: str) -> None:
    connection = Watched(pair[0].sock)
    sent = 3 * PART

    def send() -> None:
        client.sendall(bytes(sent))
        client.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    body = RequestBody(connection, 1 << 30)
    if read == "read":
        assert len(body.read(sent)) == sent
    else:
        assert body.readinto(memoryview(bytearray(sent + 1))) == sent
    sender.join(WATCHDOG_S)
    assert connection.limits[0] < 30 + 8 + 1  # PART's seconds, not the announced 1024
    assert max(connection.limits) < 30 + 8 + 1


def test_the_deadline_of_an_answer_grows_with_what_was_taken(pair, client) -> None:
    connection: Any = HttpConnection.__new__(HttpConnection)
    connection.sock = pair[0].sock
    connection.settings = Settings(send_timeout_s=30.0, min_bytes_per_s=1 << 20)
    connection.watch = None
    answer = bytes(8 * PART)
    gone: list[BaseException] = []

    def send() -> None:
        try:
            connection.send([b"head", memoryview(answer), b""], len(answer) + 4)
        except ClientGone as ex:
            gone.append(ex)

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(lambda: connection.watch is not None, "it sends")
    assert connection.watch[1] - time.monotonic() < 30 + 8 + 1
    received = 0
    while received < PART + 5:  # the next part's turn
        received += len(client.recv(1 << 20))
    assert connection.watch[1] - time.monotonic() < 30 + 8 + 1
    pair[0].sock.shutdown(socket.SHUT_RDWR)  # as the worker does then
    sender.join(WATCHDOG_S)
    assert len(gone) == 1


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_parts_are_all_there_is_and_no_larger(buffers: list[bytes], most: int) -> None:
    parts = list(parts_of(buffers, most))
    assert b"".join(b"".join(part) for part, _ in parts) == b"".join(buffers)
    assert all(sum(map(len, part)) == nbytes <= most for part, nbytes in parts)
    assert all(nbytes == most for _, nbytes in parts[:-1])


def test_a_client_that_has_sent_all_is_there_until_it_closes(pair, client) -> None:
    connection = HttpConnection.__new__(HttpConnection)
    connection.sock = pair[0].sock
    heads: Any = SimpleNamespace(unreader=_SocketUnreader(pair[0].sock))
    connection._heads = heads
    assert connection.alive()
    client.shutdown(socket.SHUT_WR)
    assert connection.alive()
    client.close()
    assert not connection.alive()
    heads.unreader.unread(b"GET / HTTP/1.1")  # further requests were received before
    assert connection.alive()
