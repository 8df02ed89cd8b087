"""HTTP/1.1 over TCP or a Unix socket, with connections kept for the next request."""

from __future__ import annotations

import contextlib
import functools
import http.client
import select
import socket
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.client.cancel_scope import cancellable
from shmserve.client.errors import InferenceError
from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import json_decoder

Array = np.ndarray[Any, Any]
_MAX_IDLE = 16
_decode = json_decoder()


class Reply(Struct, frozen=True):
    """A response; `headers` by lower-case name."""

    status: int
    headers: dict[str, str]
    body: Array

    @property
    def error(self) -> str:
        """What an error response says."""
        try:
            return str(_decode(self.body.data)["error"])
        except (UnreadableMessage, KeyError, TypeError):
            return f"the server answered with status {self.status}"


class Transport:
    """Requests to one server. Thread-safe: each request has a connection of its own."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ValueError for an address of another kind."""
        self._timeout_s = timeout_s
        self.unix_path = ""
        self._host, self._port, self._prefix = "localhost", 80, ""
        if url.startswith("unix:"):
            self.unix_path = "/" + url.removeprefix("unix:").lstrip("/")
        else:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme != "http" or not parts.hostname:
                raise ValueError(f"a server's address is http://HOST:PORT or unix:/PATH, not {url}")
            self._host, self._port = parts.hostname, parts.port or 80
            self._prefix = parts.path.rstrip("/")
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
        timeout_s: float = 0.0,
    ) -> Reply:
        """One request and its response.

        Raises:
            InferenceError: with status 0: no response came, or nobody wants it any more.
        """
        connection = self._connection(timeout_s or self._timeout_s)
        fields = {"Content-Length": str(sum(len(p) for p in body)), **(headers or {})}
        try:
            # A single piece rides with the head; pieces do not, but are not joined either.
            content: Any = bytes(body[0]) if len(body) == 1 else iter(body)
            broken = False
            if connection.sock is None:
                connection.connect()
            with cancellable(functools.partial(_interrupt, connection.sock)):
                try:
                    path = self._prefix + path
                    connection.request(method, path, content if body else None, fields)
                except (BrokenPipeError, ConnectionResetError):
                    broken = True  # it may have been refused before all of it was sent
                response = connection.getresponse()
                data = _read(response)
        except TimeoutError as ex:
            connection.close()
            raise InferenceError(0, "the server did not answer in time") from ex
        except (OSError, http.client.HTTPException) as ex:
            connection.close()
            raise InferenceError(0, f"no answer from the server: {ex}") from ex
        except BaseException:  # e.g. KeyboardInterrupt: what is left of the response is useless
            connection.close()
            raise
        self._keep(connection, broken or response.will_close)
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None and self.unix_path:
                return _UnixConnection(self.unix_path, timeout_s)
            if connection is None:
                return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            if _usable(connection):
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()

    def _keep(self, connection: http.client.HTTPConnection, ends: bool) -> None:
        with self._lock:
            if not (self._closed or ends or len(self._idle) >= _MAX_IDLE):
                self._idle.append(connection)
                return
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _usable(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection is still open: nothing is there to be read, not even EOF."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _interrupt(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server has ended it already
        sock.shutdown(socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse) -> Array:
    """The body, in memory that is the caller's to write to."""
    if response.length is None:
        return np.frombuffer(bytearray(response.read()), np.uint8)
    data = np.empty(response.length, np.uint8)
    done = 0
    while done < len(data):
        count = response.readinto(data[done:].data)
        if not count:
            raise http.client.IncompleteRead(b"", len(data) - done)
        done += count
    response.read()  # which ends the response
    return data
