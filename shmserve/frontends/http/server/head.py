"""Request heads: taken from the socket, parsed by gunicorn, and cached.

The connection peeks at a head before taking the head from the kernel (MSG_PEEK). So a body that
did not arrive whole with its head stays in the kernel, and is received into its place in memory.
Only the JSON part of an inference is taken with the head, as far as it has arrived.

After eight requests in a row that arrived whole, the connection takes the next head without a
peek. If that request is large all the same, the bytes that came with its head are copied: 8 KiB at
most, counted in the receipt.

Parsing is expensive, and clients send equal heads again and again. So a connection caches its
latest heads, byte for byte.
"""

from __future__ import annotations

import re
import socket
from typing import Any

from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import (
    InvalidRequestLine,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
)
from gunicorn.http.message import Request
from gunicorn.http.unreader import Unreader

from shmserve import waiting
from shmserve.frontends.http.server.environ import Address, proxied_environ, request_environ
from shmserve.frontends.http.server.request_body import SCRAP, Source

HEAD = "head"

_PEEK = 8192  # bytes; a smaller request is taken with its body in one system call or two
_WHOLE_RUN = 8  # requests in a row that fit, after which the next is expected to fit
_CACHED_HEADS = 4
_CACHED_HEAD_BYTES = 2048

_TEXT_LENGTH = "HTTP_INFERENCE_HEADER_CONTENT_LENGTH"
_DIGITS = re.compile(r"[0-9]{1,18}")


# Plain integers: operators of the socket module's flags are Python code, run on every request.
_LOOK = int(socket.MSG_PEEK)
_NOW = int(socket.MSG_DONTWAIT)
_WHOLE = int(socket.MSG_WAITALL)


class Head:
    """A parsed head, valid for every request of the connection that begins with equal bytes.

    Attributes:
        size: bytes of the head.
        length: bytes of the body, 0 if the body is chunked.
        text: bytes of the body's JSON part that binary tensors follow, 0 if there is none.
    """

    __slots__ = ("chunked", "close", "environ", "expects", "length", "request", "size", "text")

    def __init__(self, request: Any, environ: dict[str, Any], size: int) -> None:
        reader = request.body.reader
        self.request = request
        self.environ = environ
        self.size = size
        self.chunked = isinstance(reader, ChunkedReader)
        self.length: int = 0 if self.chunked else reader.length
        text = environ.get(_TEXT_LENGTH, "")
        self.text = min(int(text), self.length) if _DIGITS.fullmatch(text) else 0
        self.close: bool = request.should_close()
        self.expects: bool = request._expected_100_continue


class HeadRequest(Request):  # type: ignore[misc]
    """gunicorn's request, with fields that gunicorn drops.

    Attributes:
        underscored: fields with a `_` in their names (dropped by `header_map`).
    """

    def __init__(self, cfg: Any, unreader: Unreader, client: Address, number: int) -> None:
        self.underscored: list[tuple[str, str]] = []
        super().__init__(cfg, unreader, client, number)

    def _apply_header_policy(
        self, name: str, value: str, *state: Any, from_trailer: bool = False
    ) -> tuple[str, str] | None:
        kept: tuple[str, str] | None = super()._apply_header_policy(
            name, value, *state, from_trailer=from_trailer
        )
        if kept is None and not from_trailer:
            self.underscored.append((name.lower(), value))
        return kept


class _SocketUnreader(Unreader):  # type: ignore[misc]
    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def chunk(self, size_hint: int | None = None) -> bytes:
        return self._sock.recv(min(max(size_hint or 0, 1 << 16), 1 << 20))


class Heads:
    """The heads of one connection, one after another.

    Attributes:
        found: bytes in which the last head was found; empty if the head was read ahead or came in
            pieces.
        taken: whether `found` has been taken from the kernel; if not, `take` must follow.
        whole: number of requests in a row that came with their bodies. From `_WHOLE_RUN` on, the
            next head is taken without a peek.
        unreader: holds the bytes received beyond the last head.
    """

    __slots__ = (
        "_cached", "_cfg", "_client", "_environ", "_number", "_proxied", "_waiter", "found",
        "taken", "unreader", "whole",
    )  # fmt: skip

    def __init__(self, waiter: Source, cfg: Any, client: Address, environ: dict[str, Any]) -> None:
        self._waiter = waiter
        self._cfg = cfg
        self._client = client
        self._environ = environ
        self._cached: dict[bytes, Head] = {}
        self._number = 0
        self._proxied = cfg.proxy_protocol != "off"
        self.found = b""
        self.taken = False
        self.whole = 0
        self.unreader = _SocketUnreader(waiter.sock)

    def next(self) -> Head | None:
        """Return the next head, or None if the client has closed the connection.

        Bytes beyond the head and its empty line stay in the kernel, except after a chunked body
        and if `taken`.

        Raises:
            ParseException: the head is malformed or too large.
            NoMoreData: the head ended in the middle.
        """
        self.found = b""
        ahead = self.unreader
        if self._proxied or ahead.buf.tell():
            # a client may have sent many requests ahead, so let other connections run
            waiting.pause()
            data = self._read_on(ahead.take_buffered())
        else:
            self.taken = taken = self.whole >= _WHOLE_RUN
            data = self._waiter.sock.recv(_PEEK, 0 if taken else _LOOK)
            end = data.find(b"\r\n\r\n") + 4
            if end > 3:
                self.found, data = data, data[:end]
            elif data:
                data = self._read_on(data if taken else self._take(len(data)))
        return (self._cached.get(data) or self._parse(data)) if data else None

    def take(self, head: Head, decrypted: bool) -> int:
        """Take the bytes of the head from the kernel, if they are still there.

        The body is taken along if all of it has arrived, or if some of it is `decrypted` already.

        Returns:
            Number of the request's bytes taken so far; -1 if the connection was reset meanwhile.
        """
        found, whole = self.found, head.size + head.length
        end = min(whole, len(found))
        # at most `len(SCRAP)` bytes, which have arrived, so recv_into does not wait
        if not self.taken:
            if end < whole and not decrypted:
                end = min(head.size + head.text, end)
            if self._waiter.sock.recv_into(SCRAP, end, _NOW) != end:
                return -1
        elif head.chunked or len(found) > end:
            self.unreader.unread(found[end:])
        self.whole = self.whole + 1 if end == whole > head.size and not decrypted else 0
        return end

    def _parse(self, data: bytes) -> Head:
        if len(data) > self._waiter.settings.max_head_bytes:
            raise LimitRequestHeaders("head too large")
        self._number += 1
        self.unreader.unread(data)
        request = HeadRequest(self._cfg, self.unreader, self._client, self._number)
        if self._proxied:
            self._environ = {**self._environ, **proxied_environ(request)}
        head = Head(request, request_environ(self._environ, request), len(data))
        if not self._proxied and not head.chunked and len(data) <= _CACHED_HEAD_BYTES:
            if len(self._cached) >= _CACHED_HEADS:
                self._cached.clear()
            self._cached[data] = head
        return head

    def _read_on(self, data: bytes) -> bytes:
        """Return a head of which `data` has been taken: the head comes in pieces, or was read
        ahead.

        Bytes beyond the head stay in the kernel.
        """
        self._waiter.wait(HEAD, self._waiter.settings.head_timeout_s)
        if self._proxied:  # only the parser finds the end of a head after PROXY protocol
            return data or self.unreader.chunk()
        gathered = bytearray(data)
        while (end := gathered.find(b"\r\n\r\n")) < 0:
            _check_partial(gathered, self._waiter.settings.max_head_bytes)
            more = self._waiter.sock.recv(_PEEK, _LOOK)
            if not more:
                raise NoMoreData(bytes(gathered))
            edge = bytes(gathered[-3:])
            empty_line = (edge + more).find(b"\r\n\r\n")
            count = empty_line + 4 - len(edge) if empty_line >= 0 else len(more)
            gathered += self._take(count)
        self.unreader.unread(bytes(gathered[end + 4 :]))
        return bytes(gathered[: end + 4])

    def _take(self, count: int) -> bytes:
        return self._waiter.sock.recv(count, _WHOLE) if count else b""


def _check_partial(data: bytearray, limit: int) -> None:
    """Refuse bytes that cannot become a head within the limit."""
    if data.count(b"\n") != data.count(b"\r\n"):
        raise InvalidRequestLine("bare LF")
    if len(data) >= limit:
        if b"\r\n" in data:
            raise LimitRequestHeaders("head too large")
        raise LimitRequestLine(len(data), limit)
