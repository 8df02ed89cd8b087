"""HTTP/1.1 over TCP or a Unix socket, with idle connections kept for later requests."""

from __future__ import annotations

import contextlib
import functools
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.client.wire.cancel_scope import cancellable
from shmserve.client.wire.connections import ServerAddress, failures
from shmserve.client.wire.credentials import Credentials, Secret
from shmserve.client.wire.inference_error import CLOSED, LATE, InferenceError
from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import json_decoder
from shmserve.transport.trust.local_peers import local_user_of

Array = np.ndarray[Any, Any]
_MAX_IDLE = 16
_PIECE = 1 << 16  # largest read from a stream, in bytes
_LINE = 200  # bytes of a text that an error shows
_EVENTS = "text/event-stream"
_EVENT_END = b"\n\n"
# With TLS 1.3, a server refuses a certificate after the handshake of the client's side.
_BROKEN = (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_decode = json_decoder()


class Reply(Struct, frozen=True):
    """HTTP response; header names are in lower case. `user`: uid of the process that answered, if
    that was asked for and the process is known to be on this host. `keyed`: whether the request had
    a key."""

    status: int
    headers: dict[str, str]
    body: Array
    user: int | None = None
    keyed: bool = False

    @property
    def error(self) -> str:
        """Return the message of an error response."""
        try:
            text = str(_decode(self.body.data)["error"])
        except (UnreadableMessage, KeyError, TypeError):
            text = f"the server answered with status {self.status}"
            if self.headers.get("content-type", "").startswith("text/plain"):
                line = self.body[:_LINE].tobytes().partition(b"\n")[0].decode(errors="replace")
                text = f"{text}: {line}" if line.isprintable() else text
        if self.status != 401:
            return text
        if not self.keyed:
            return "the server asks for a key (key, key_file, or SHMSERVE_KEY)"
        return f"the server does not accept the key: {text}"


class Transport:
    """Requests to one server. Thread-safe: concurrent requests use separate connections.
    `timeout_s`: default seconds to wait for an answer."""

    def __init__(self, url: str, timeout_s: float, credentials: Credentials | None = None) -> None:
        """Parse the address. Raises ValueError as `ServerAddress`. `credentials`: key and
        certificates to present; None: none."""
        self.timeout_s = timeout_s
        credentials = credentials or Credentials(key="")
        self._address = ServerAddress(url, credentials)
        self.unix_path = self._address.unix_path
        self._key_fields: Mapping[str, str] = {}
        if credentials.key:
            self._key_fields = {"Authorization": Secret(f"Bearer {credentials.key}")}
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    @property
    def is_local(self) -> bool:
        """Return True if the server is certainly on this host, False if it may be elsewhere."""
        return self._address.is_local

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
        timeout_s: float = 0.0,
        whose: bool = False,
    ) -> Reply:
        """Send a request and return the response, if `whose` with the user who answered. A GET is
        sent once more if its connection ends without a response, for example with the HTTP worker
        (RFC 9110, section 9.2.2).

        Raises:
            InferenceError: with status 0: no response came, the request was cancelled, or the
                transport is closed.
        """
        fields = {"Content-Length": str(sum(len(p) for p in body)), **(headers or {})}
        until = time.monotonic() + (timeout_s or self.timeout_s)
        try:
            return self._request(method, path, fields, body, until, whose)
        except InferenceError as ex:
            lost = isinstance(ex.__cause__, (ConnectionResetError, ssl.SSLEOFError))
            if method != "GET" or not lost:
                raise
        return self._request(method, path, fields, body, until, whose)

    def _request(
        self,
        method: str,
        path: str,
        fields: Mapping[str, str],
        body: Sequence[bytes | memoryview],
        until: float,
        whose: bool,
    ) -> Reply:
        connection = self._connection(left_s(until))
        with failures(connection), _interruptible(connection) as sock:
            broken = self._send(connection, method, path, fields, body)
            response = connection.getresponse()
            user = local_user_of(sock) if whose else None
            data = _read(response)
        self.keep(connection, broken or response.will_close)
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, data, user, bool(self._key_fields))

    def events(self, path: str, body: bytes, until: float) -> EventStream:
        """Send a POST and return the server-sent events of the response. `until` is the deadline of
        the last event (`time.monotonic`). Raise InferenceError if the server refused, or as
        `request`."""
        connection = self._connection(left_s(until))
        fields = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        with failures(connection), _interruptible(connection) as sock:
            self._send(connection, "POST", path, fields, [body])
            response = connection.getresponse()
            # also with an error status, which is that of the first event
            if response.headers.get_content_type() == _EVENTS:
                return EventStream(self, connection, sock, response, until)
            reply = Reply(response.status, {}, _read(response), None, bool(self._key_fields))
        connection.close()
        raise InferenceError(reply.status, reply.error)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        fields: Mapping[str, str],
        body: Sequence[bytes | memoryview],
    ) -> bool:
        """Send a request. Return True if the connection broke meanwhile: the server may have
        answered with a refusal before reading the whole body."""
        # http.client sends a single piece together with the head. Several pieces are sent one by
        # one, which saves joining large arrays.
        content: Any = bytes(body[0]) if len(body) == 1 else iter(body)
        try:
            target, fields = self._address.prefix + path, {**self._key_fields, **fields}
            connection.request(method, target, content if body else None, fields)
        except _BROKEN:
            return True
        return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if self._closed:
                    raise InferenceError(0, CLOSED)
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._address.connection(timeout_s)
            if _usable(connection):
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()

    def keep(self, connection: http.client.HTTPConnection, ends: bool) -> None:
        """Keep the connection for later requests, unless `ends` is set or enough are idle."""
        with self._lock:
            if not (self._closed or ends or len(self._idle) >= _MAX_IDLE):
                self._idle.append(connection)
                return
        connection.close()


class EventStream(Struct, eq=False):
    """Server-sent events as they arrive. For one thread at a time."""

    _transport: Transport
    _connection: http.client.HTTPConnection
    _sock: socket.socket
    _response: http.client.HTTPResponse
    _until: float
    _received: bytearray = bytearray()
    _seen: int = 0  # leading bytes of `_received` in which no event ends
    _over: bool = False

    def next(self) -> bytes | None:
        """Return the data of the next event; None after the last event. Must not be called after
        None. Raise InferenceError as `Transport.request` does."""
        with failures(self._connection):
            while (end := self._received.find(_EVENT_END, self._seen)) < 0:
                self._seen = max(0, len(self._received) - len(_EVENT_END) + 1)
                with cancellable(functools.partial(_interrupt, self._sock)):
                    self._sock.settimeout(left_s(self._until))
                    piece = self._response.read1(_PIECE)
                if not piece:
                    self._over = True
                    self._response.read()  # marks a response with an empty body as ended
                    self._transport.keep(self._connection, self._response.will_close)
                    return None
                self._received += piece
        event = bytes(self._received[:end]).removeprefix(b"data: ")
        del self._received[: end + len(_EVENT_END)]
        self._seen = 0
        return event

    def close(self) -> None:
        """Stop reading. Closing the connection of an unfinished stream cancels the request."""
        if not self._over:
            self._response.close()
            self._connection.close()


def _usable(connection: http.client.HTTPConnection) -> bool:
    """Return True if an idle connection is open: neither bytes nor EOF are to be read."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def left_s(until: float) -> float:
    """Return the seconds until a deadline. Raise InferenceError if the deadline has passed."""
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise InferenceError(0, LATE)
    return remaining_s


@contextlib.contextmanager
def _interruptible(connection: http.client.HTTPConnection) -> Iterator[socket.socket]:
    """Open the connection if needed; a cancelled scope interrupts waits within the context."""
    if connection.sock is None:
        connection.connect()
    sock: socket.socket = connection.sock
    with cancellable(functools.partial(_interrupt, sock)):
        yield sock


def _interrupt(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server has closed the connection already
        # `SSLSocket.shutdown` ends TLS first: another thread would go on sending in the clear
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse) -> Array:
    """Return the response body in writable memory."""
    if response.length is None:
        return np.frombuffer(bytearray(response.read()), np.uint8)
    data = np.empty(response.length, np.uint8)
    done = 0
    while done < len(data):
        count = response.readinto(data[done:].data)
        if not count:
            raise http.client.IncompleteRead(b"", len(data) - done)
        done += count
    response.read()  # marks the response as ended
    return data
