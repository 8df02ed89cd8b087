"""Responses of the connection worker, without sockets."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from shmserve.frontends.http.server.response import BufferBody, FramingError, HttpResponse


class Wire:
    def __init__(self, lasting: bool = True) -> None:
        self.sends: list[bytes] = []
        self._lasting = lasting

    def send(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> None:
        self.sends.append(b"".join(buffers))
        assert len(self.sends[-1]) == nbytes

    def lasting(self) -> bool:
        return self._lasting

    @property
    def head(self) -> list[str]:
        return b"".join(self.sends).split(b"\r\n\r\n", 1)[0].decode("latin-1").split("\r\n")

    @property
    def body(self) -> bytes:
        return b"".join(self.sends).split(b"\r\n\r\n", 1)[1]


def respond(wire: Wire, method: str = "GET", version: tuple[int, int] = (1, 1)) -> HttpResponse:
    return HttpResponse(wire, method, version, keep_alive=True)


def sent(
    body: Any, *fields: tuple[str, str], status: str = "200 OK", lasting: bool = True, **how: Any
) -> tuple[Wire, HttpResponse]:
    """Send a response with this body; return what was sent, and the response."""
    wire = Wire(lasting)
    response = respond(wire, **how)
    response.start_response(status, list(fields))
    response.send(body)
    return wire, response


def test_whole_body_goes_out_with_its_head() -> None:
    body = BufferBody([b"ab", memoryview(bytearray(8)).cast("d")])  # type: ignore[list-item]
    wire, response = sent(body, ("X-A", "1"))
    assert len(wire.sends) == 1
    assert wire.body == b"ab" + bytes(8)
    assert {"HTTP/1.1 200 OK", "Server: shmserve", "X-A: 1", "Content-Length: 10"} <= set(wire.head)
    assert response.sent == 10
    assert response.keep_alive


@pytest.mark.parametrize(
    ("name", "value"),
    [("X", "a\r\nY: b"), ("X", "a\nb"), ("X", "\0"), ("X y", "a"), ("X:", "a"), ("", "a")],
)
def test_header_injection_is_refused(name: str, value: str) -> None:
    for _ in range(2):  # the second time could come from the cache
        wire = Wire()
        response = respond(wire)
        response.start_response("200 OK", [(name, value)])
        with pytest.raises(ValueError):
            response.send([b""])
        assert not wire.sends
        assert not response.begun


@pytest.mark.parametrize("status", ["200\r\nX: y", "20", "OK", "200 \n"])
def test_malformed_status_is_refused(status: str) -> None:
    with pytest.raises(ValueError):
        sent([], status=status)


def test_content_length_must_be_a_number() -> None:
    with pytest.raises(ValueError):
        sent([b"abc"], ("Content-Length", "+3"))


def test_hop_by_hop_fields_are_dropped_and_close_is_heard() -> None:
    fields = [("Connection", "close"), ("Transfer-Encoding", "chunked"), ("Upgrade", "x")]
    wire, response = sent([b"abc"], *fields)
    assert "Connection: close" in wire.head
    assert not response.keep_alive
    assert not any(line.startswith(("Transfer", "Upgrade")) for line in wire.head)


@pytest.mark.parametrize(
    ("method", "status", "length"),
    [
        ("HEAD", "200 OK", "Content-Length: 3"),
        ("GET", "204 No Content", None),
        ("GET", "304 Not Modified", "Content-Length: 3"),
    ],
)
def test_answers_without_body(method: str, status: str, length: str | None) -> None:
    wire, _ = sent([b"abc"], ("Content-Length", "3"), status=status, method=method)
    assert wire.body == b""
    assert (length in wire.head) if length else not any("Length" in line for line in wire.head)


def test_stream_is_flushed_piece_by_piece_in_chunks() -> None:
    wire, response = sent(piece for piece in (b"a", b"", b"bc"))
    assert wire.body == b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
    assert len(wire.sends) == 3
    assert response.keep_alive


def test_stream_of_known_length_is_not_chunked() -> None:
    wire, _ = sent(iter([b"a", b"bc"]), ("Content-Length", "3"))
    assert wire.body == b"abc"


def test_empty_stream_has_length_zero() -> None:
    assert "Content-Length: 0" in sent(iter([]))[0].head


def test_stream_to_http_1_0_ends_with_the_connection() -> None:
    wire, response = sent(iter([b"abc"]), version=(1, 0))
    assert wire.body == b"abc"
    assert not response.keep_alive


def test_generator_may_start_the_response_late() -> None:
    wire = Wire()
    response = respond(wire)

    def application():
        response.start_response("201 Created", [])
        yield b"x"

    response.send(application())
    assert wire.head[0] == "HTTP/1.1 201 Created"


def test_write_callable() -> None:
    wire = Wire()
    response = respond(wire)
    write = response.start_response("200 OK", [("Content-Length", "4")])
    write(b"ab")
    response.send([b"cd"])
    assert wire.body == b"abcd"


@pytest.mark.parametrize(("body", "begun"), [(b"abc", False), (b"a", True)], ids=["more", "less"])
def test_wrong_lengths(body: bytes, begun: bool) -> None:
    response = respond(Wire())
    response.start_response("200 OK", [("Content-Length", "2")])
    with pytest.raises(FramingError):
        response.send([body])
    assert response.begun is begun
    assert response.keep_alive is not begun


def test_starting_twice_needs_an_exception() -> None:
    response = respond(Wire())
    response.start_response("200 OK", [])
    with pytest.raises(AssertionError):
        response.start_response("200 OK", [])
    try:
        raise KeyError("first")
    except KeyError:
        response.start_response("500 Oops", [], sys.exc_info())
        response.send([b""])
        with pytest.raises(KeyError):
            response.start_response("500 Oops", [], sys.exc_info())


def test_not_starting_is_an_error() -> None:
    with pytest.raises(AssertionError):
        respond(Wire()).send([b"abc"])


def test_last_answer_of_a_stopping_worker_says_so() -> None:
    wire, response = sent([b""], lasting=False)
    assert "Connection: close" in wire.head
    assert not response.keep_alive


def test_buffer_body_closes_and_iterates_bytes() -> None:
    closed: list[int] = []
    body = BufferBody([b"a", memoryview(b"b")], lambda: closed.append(1))
    assert list(body) == [b"a", b"b"]
    body.close()
    assert closed == [1]
    BufferBody([]).close()
