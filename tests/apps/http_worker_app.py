"""A WSGI application that shows the connection worker's behaviour; started by the worker's
tests."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmserve import waiting
from shmserve.frontends.http.server.response import BufferBody

Environ = dict[str, Any]
Start = Callable[[str, list[tuple[str, str]]], object]
Body = Iterable[bytes | memoryview]

_lock = threading.Lock()
_closed = 0


def application(environ: Environ, start_response: Start) -> Body:
    return ROUTES.get(environ["PATH_INFO"], echo)(environ, start_response)


def answer(start_response: Start, body: bytes, *headers: tuple[str, str]) -> Body:
    start_response("200 OK", [("Content-Length", str(len(body))), *headers])
    return [body]


def echo(environ: Environ, start_response: Start) -> Body:
    return answer(start_response, environ["wsgi.input"].read())


def digest(environ: Environ, start_response: Start) -> Body:
    """Receive with readinto, and return a digest of the received bytes."""
    body = environ["wsgi.input"]
    size = int(environ.get("CONTENT_LENGTH") or environ["HTTP_X_SIZE"])
    first = int(environ.get("HTTP_X_FIRST", "0"))
    head = body.read(first)
    memory = bytearray(size - first)
    got = body.readinto(memoryview(memory))
    told = {
        "got": first + got,
        "copied": body.copied,
        "failed": body.failed,
        "sha": hashlib.sha256(head + memory[:got]).hexdigest(),
    }
    return answer(start_response, json.dumps(told).encode())


def big(environ: Environ, start_response: Start) -> Body:
    """Return a body of buffers that counts its closings."""
    size = int(environ["QUERY_STRING"])
    parts: list[bytes | memoryview] = [
        b"head",
        memoryview(bytearray(b"x" * size)),
        memoryview(b"tail"),
    ]
    start_response("200 OK", [("Content-Length", str(size + 8))])
    return BufferBody(parts, count_close)


def count_close() -> None:
    global _closed
    with _lock:
        _closed += 1


def closed(environ: Environ, start_response: Start) -> Body:
    return answer(start_response, str(_closed).encode())


class Stream:
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    def close(self) -> None:
        count_close()


def stream(environ: Environ, start_response: Start) -> Body:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return Stream([b"one", b"", b"two", b"three"])


def endless(environ: Environ, start_response: Start) -> Body:
    start_response("200 OK", [])
    return Stream([b"x" * 65536] * 100_000)


def ignore(environ: Environ, start_response: Start) -> Body:
    return answer(start_response, b"ignored")


def slow(environ: Environ, start_response: Start) -> Body:
    waiting.sleep(float(environ["QUERY_STRING"] or "1"))
    return answer(start_response, b"slow")


def beside(environ: Environ, start_response: Start) -> Body:
    """Run long work in a separate thread."""
    waiting.beside(time.sleep, float(environ["QUERY_STRING"]))
    return answer(start_response, b"beside")


def broken(environ: Environ, start_response: Start) -> Body:
    raise RuntimeError("secret detail")


def inject(environ: Environ, start_response: Start) -> Body:
    return answer(start_response, b"", ("X-Evil", "a\r\nX-Injected: 1"))


def short(environ: Environ, start_response: Start) -> Body:
    start_response("200 OK", [("Content-Length", "10")])
    return [b"four"]


def nothing(environ: Environ, start_response: Start) -> Body:
    start_response("204 No Content", [])
    return []


def info(environ: Environ, start_response: Start) -> Body:
    told = {k: v for k, v in environ.items() if isinstance(v, str | int | bool)}
    told["alive"] = environ["shmserve.connection"].alive()
    told["fds"] = len(os.listdir("/proc/self/fd"))
    told["threads"] = threading.active_count()
    told["pid"] = os.getpid()
    return answer(start_response, json.dumps(told).encode())


def gone(environ: Environ, start_response: Start) -> Body:
    """Waits until the client has gone."""
    while environ["shmserve.connection"].alive():
        waiting.sleep(0.02)
    count_close()
    return answer(start_response, b"too late")


ROUTES = {
    "/digest": digest,
    "/big": big,
    "/closed": closed,
    "/stream": stream,
    "/endless": endless,
    "/ignore": ignore,
    "/slow": slow,
    "/beside": beside,
    "/broken": broken,
    "/inject": inject,
    "/short": short,
    "/nothing": nothing,
    "/info": info,
    "/gone": gone,
}
