"""Request bodies on a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge
from shmserve.frontends.http.server.chunked import ChunkedBody
from shmserve.frontends.http.server.head import _SocketUnreader
from shmserve.frontends.http.server.request_body import CONTINUE, RequestBody


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.settings = Settings(max_chunks=3, max_request_bytes=100)
        self.watch: tuple[str, float] | None = None
        self.expired = False


class Request:
    limit_request_field_size = 100
    max_buffer_headers = 1000
    trailers: list[tuple[str, str]]

    def parse_headers(self, data: bytes, from_trailer: bool) -> list[tuple[str, str]]:
        assert from_trailer
        return [("X", data.decode())]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    yield Connection(ours), theirs
    ours.close()
    theirs.close()


Pair = tuple[Connection, socket.socket]


def test_never_reads_past_the_body(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"cdefNEXT")
    body = RequestBody(connection, 4, b"ab")
    assert body.read() == b"abcdef"
    assert body.read() == b""
    assert body.finished
    assert connection.sock.recv(10) == b"NEXT"


def test_read_in_steps(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"cdef")
    body = RequestBody(connection, 4, b"ab")
    assert [body.read(1), body.read(3), body.read(0), body.read(None)] == [b"a", b"bcd", b"", b"ef"]


def test_readinto_counts_only_what_came_with_the_head(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"cdef")
    body = RequestBody(connection, 4, b"ab")
    assert body.read(1) == b"a"
    memory = bytearray(8)
    assert body.readinto(memoryview(memory)) == 5
    assert memory == b"bcdef\0\0\0"
    assert body.copied == 1


def test_readinto_of_a_small_view_leaves_the_rest(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"efgh")
    body = RequestBody(connection, 4, b"abcd")
    memory = bytearray(2)
    got = b""
    for _ in range(4):
        assert body.readinto(memoryview(memory)) == 2
        got += memory
    assert got == b"abcdefgh"
    assert body.readinto(memoryview(memory)) == 0


def test_readinto_typed_memory(pair: Pair) -> None:
    connection, client = pair
    client.sendall(bytes(range(16)))
    memory = bytearray(16)
    assert RequestBody(connection, 16).readinto(memoryview(memory).cast("f")) == 16
    assert memory == bytes(range(16))


def test_lines(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"ne\ntwo\nthree")
    body = RequestBody(connection, 12, b"o")
    assert body.readline(2) == b"on"
    assert body.readline() == b"e\n"
    assert list(body) == [b"two\n", b"three"]
    assert RequestBody(connection, 0, b"a\nb\nc").readlines() == [b"a\n", b"b\n", b"c"]
    assert RequestBody(connection, 0, b"a\nb\nc").readlines(1) == [b"a\n"]


def test_client_that_stops(pair: Pair) -> None:
    connection, client = pair
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


def test_deadline_is_set_while_waiting_only(pair: Pair) -> None:
    connection, client = pair
    seen: list[object] = []

    class Spy:
        def recv(self, size: int, flags: int) -> bytes:
            seen.append(connection.watch)
            return client.recv(size)

    connection.sock.sendall(b"abcd")
    body = RequestBody(connection, 4)
    connection.sock, original = Spy(), connection.sock  # type: ignore[assignment]
    assert body.read(2) == b"ab"
    assert body.read(2) == b"cd"
    connection.sock = original
    assert seen[0] == seen[1] != None  # noqa: E711 (one deadline for the whole body)
    assert connection.watch is None


def test_continue_is_sent_on_the_first_read_from_the_socket(pair: Pair) -> None:
    connection, client = pair
    body = RequestBody(connection, 4, expects=True)
    assert not body.drain(100)
    client.sendall(b"abcd")
    assert body.read(2) == b"ab"
    assert body.read() == b"cd"
    client.settimeout(0.05)
    assert client.recv(1000) == CONTINUE


def test_drain(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"x" * 50)
    assert RequestBody(connection, 50).drain(100)
    assert not RequestBody(connection, 50).drain(0)
    assert RequestBody(connection, 0, b"abc").drain(0)


def chunked(connection: Connection, expects: bool = False) -> ChunkedBody:
    return ChunkedBody(connection, Request(), _SocketUnreader(connection.sock), expects)


def test_chunked(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"3\r\nabc\r\n2;a=b\r\nde\r\n0\r\nX: y\r\n\r\nNEXT")
    body = chunked(connection)
    memory = bytearray(4)
    assert body.readinto(memoryview(memory)) == 4
    assert body.copied == 4
    assert not body.finished
    assert body.read() == b"e"
    assert body.finished


def test_chunked_limits(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"1\r\nx\r\n" * 4)
    body = chunked(connection)
    with pytest.raises(TooLarge, match="max_chunks"):
        body.read()
    assert body.failed
    assert body.read() == b""


def test_chunked_size_limit(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"65\r\n" + b"x" * 101)
    with pytest.raises(TooLarge, match="max_request_bytes"):
        chunked(connection).read()


@pytest.mark.parametrize("data", [b"zz\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"\r\n", b"x" * 200])
def test_chunked_framing_errors(pair: Pair, data: bytes) -> None:
    connection, client = pair
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)
    body = chunked(connection)
    with pytest.raises(InvalidArgument, match="chunked"):
        body.read()
    assert body.failed
    assert not body.drain(100)


def test_chunked_client_that_stops(pair: Pair) -> None:
    connection, client = pair
    client.sendall(b"5\r\nab")
    client.shutdown(socket.SHUT_WR)
    body = chunked(connection)
    assert body.read() == b"ab"
    assert body.failed
