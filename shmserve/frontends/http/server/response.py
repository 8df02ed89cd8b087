"""Responses: from the result of a WSGI application to bytes on the socket."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from time import time
from types import TracebackType
from typing import Protocol

from falcon import Response
from gunicorn.http.message import TOKEN_RE
from gunicorn.http.wsgi import HEADER_VALUE_RE, STATUS_RE
from gunicorn.util import http_date

Buffer = bytes | memoryview
ExcInfo = tuple[type[BaseException], BaseException, TracebackType]

_ORDINARY, _LENGTH, _DROPPED, _CLOSE = range(4)
_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers",
    "transfer-encoding", "upgrade",
}  # fmt: skip
_OURS = {"server", "date"}
_DIGITS = re.compile(r"[0-9]{1,18}")
_CACHE_SIZE = 1024
_CACHED_CHARACTERS = 200


class BufferBody:
    """Buffers to send unchanged, and a function to call once the buffers are free.

    The connection worker sends `buffers` together with the head in one system call. Any other WSGI
    server iterates over the object, which copies the buffers, and calls `close`.

    `buffers`: the body's parts in order; valid until `close`. `close`: called after the last byte
    was sent or the client was lost. The connection worker calls `close` once.
    """

    __slots__ = ("buffers", "close")

    def __init__(
        self, buffers: Sequence[Buffer], close: Callable[[], object] = lambda: None
    ) -> None:
        self.buffers = buffers
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        for buffer in self.buffers:
            yield bytes(buffer)


def parts_of(buffers: Sequence[Buffer], limit: int) -> Iterator[tuple[list[memoryview], int]]:
    """Yield the buffers' bytes in parts of `limit` bytes: views, and their total bytes. The last
    part may be smaller."""
    part: list[memoryview] = []
    room = limit
    for buffer in buffers:
        rest = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
        while rest:
            taken, rest = rest[:room], rest[room:]
            part.append(taken)
            room -= len(taken)
            if not room:
                yield part, limit
                part, room = [], limit
    if part:
        yield part, limit - room


class ByteSink(Protocol):
    """The connection, as a response uses it."""

    def send(self, buffers: Sequence[Buffer], nbytes: int) -> None: ...

    def lasting(self) -> bool: ...


class FramingError(Exception):
    """The length of the application's body differs from its Content-Length."""


_lines: dict[tuple[str, str], tuple[int, bytes]] = {}
_statuses: dict[str, tuple[int, bytes]] = {}
_date: tuple[int, bytes] = (0, b"")


def _line(name: str, value: str) -> tuple[int, bytes]:
    """Return kind and encoded line of a header field. Raise ValueError for header injection."""
    if not TOKEN_RE.fullmatch(name):
        raise ValueError("a response header's name is no token")
    if not HEADER_VALUE_RE.fullmatch(value):
        raise ValueError(f"the value of response header {name} has forbidden characters")
    kind, lower = _ORDINARY, name.lower()
    if lower == "content-length":
        kind = _LENGTH
        if not _DIGITS.fullmatch(value):
            raise ValueError("the response's Content-Length is no number")
    elif lower == "connection" and value.strip().lower() == "close":
        kind = _CLOSE
    elif lower in _HOP_BY_HOP or lower in _OURS:
        kind = _DROPPED
    field = kind, f"{name}: {value}\r\n".encode("latin-1")
    if len(value) <= _CACHED_CHARACTERS:
        if len(_lines) >= _CACHE_SIZE:
            _lines.clear()
        _lines[name, value] = field
    return field


def _status_line(status: str) -> tuple[int, bytes]:
    if not STATUS_RE.fullmatch(status):
        raise ValueError("the response's status is malformed")
    line = int(status[:3]), f"HTTP/1.1 {status}\r\nServer: shmserve\r\n".encode("latin-1")
    if len(_statuses) >= _CACHE_SIZE:
        _statuses.clear()
    _statuses[status] = line
    return line


def _date_line(now: int) -> bytes:
    global _date
    line = f"Date: {http_date(now)}\r\n".encode()
    _date = now, line
    return line


class HttpResponse:
    """An answer: takes status, header and body from the application, and sends all three.

    Args:
        sink: the connection.
        method: the request's method.
        version: the request's HTTP version.
        keep_alive: whether the connection may stay open after the answer.

    Attributes:
        keep_alive: after sending: whether the connection may be used again.
        begun: whether anything has been sent.
        sent: bytes of the body that were sent.
        status, headers: for the access log.
    """

    __slots__ = (
        "_chunked", "_length", "_omit", "_sink", "begun", "headers", "keep_alive", "method",
        "sent", "status", "version",
    )  # fmt: skip

    def __init__(
        self, sink: ByteSink, method: str, version: tuple[int, int], keep_alive: bool
    ) -> None:
        self._sink = sink
        self.method = method
        self.version = version
        self.keep_alive = keep_alive
        self.begun = False
        self.sent = 0
        self.status = ""
        self.headers: Sequence[tuple[str, str]] = ()
        self._length: int | None = None
        self._chunked = False
        self._omit = False

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], None]:
        if exc_info is not None:
            if self.begun:
                raise exc_info[1].with_traceback(exc_info[2])
        elif self.status:
            raise AssertionError("the application started its response twice")
        self.status = status
        self.headers = headers
        return self._write

    def send(self, result: Iterable[bytes]) -> None:
        """Send everything that the application returned. The caller closes `result`."""
        if self.begun or not self.status or not isinstance(result, (BufferBody, list, tuple)):
            self._send_pieces(result)
            return
        buffers: Sequence[Buffer] = result.buffers if type(result) is BufferBody else result  # type: ignore[assignment]
        total = 0
        for buffer in buffers:
            total += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        head = self._head(total)
        length = self._length
        if self._omit:
            buffers, total, length = (), 0, None
        elif length is not None and total > length:
            raise FramingError(f"the body has {total} bytes, Content-Length says {length}")
        self.sent = total
        self.begun = True
        self._sink.send([head, *buffers], len(head) + total)
        if length is not None and total < length:
            self._check_length()

    def _send_pieces(self, result: Iterable[bytes]) -> None:
        for piece in result:
            if piece:
                self._write(piece)
        if not self.begun:
            head = self._head(0)
            self.begun = True
            self._sink.send([head], len(head))
        elif self._chunked:
            self._sink.send([b"0\r\n\r\n"], 5)
        self._check_length()

    def _write(self, piece: bytes) -> None:
        buffers: list[Buffer] = []
        if not self.begun:
            buffers.append(self._head(None))
            self.begun = True
        if self._omit:
            piece = b""
        elif self._length is not None:
            piece = piece[: self._length - self.sent]
        self.sent += len(piece)
        if piece and self._chunked:
            buffers += [b"%x\r\n" % len(piece), piece, b"\r\n"]
        elif piece:
            buffers.append(piece)
        if buffers:
            self._sink.send(buffers, sum(map(len, buffers)))

    def _check_length(self) -> None:
        if self._length is not None and not self._omit and self.sent != self._length:
            self.keep_alive = False
            raise FramingError(
                f"the body has {self.sent} bytes, Content-Length says {self._length}"
            )

    def _head(self, total: int | None) -> bytes:
        """Return the encoded head. `total`: bytes of the body; None if unknown."""
        if not self.status:
            raise AssertionError("the application returned without calling start_response")
        code, line = _statuses.get(self.status) or _status_line(self.status)
        self._omit = code in (204, 304) or code < 200 or self.method == "HEAD"
        now = int(time())
        second, date = _date
        parts = [line, date if second == now else _date_line(now)]
        for pair in self.headers:
            kind, line = _lines.get(pair) or _line(*pair)
            if kind == _LENGTH:
                if code == 204 or code < 200:
                    continue
                self._length = int(pair[1])
            elif kind:
                if kind == _CLOSE:
                    self.keep_alive = False
                continue
            parts.append(line)
        # Framing of the body, and whether the connection stays open
        if self._length is None and not self._omit:
            if total is not None:
                self._length = total
                parts.append(b"Content-Length: %d\r\n" % total)
            elif self.version >= (1, 1):
                self._chunked = True
                parts.append(b"Transfer-Encoding: chunked\r\n")
            else:
                self.keep_alive = False
        self.keep_alive = self.keep_alive and self._sink.lasting()
        if not self.keep_alive:
            parts.append(b"Connection: close\r\n")
        elif self.version < (1, 1):
            parts.append(b"Connection: keep-alive\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)


class _Chunks:
    """A body sent piece by piece. `close` calls `on_close` once, even if no piece was taken."""

    __slots__ = ("_on_close", "_pieces")

    def __init__(self, pieces: Iterator[bytes], on_close: Callable[[], object]) -> None:
        self._pieces = pieces
        self._on_close: Callable[[], object] | None = on_close

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def send_chunks(
    resp: Response, first: bytes, rest: Iterator[bytes], on_close: Callable[[], object]
) -> None:
    """Stream pieces as the response's body. The server calls `on_close` after the last byte, or
    when the client is gone."""
    resp.stream = _Chunks(chain((first,) if first else (), rest), on_close)
