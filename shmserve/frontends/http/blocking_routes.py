"""Routes of extensions that may block: responders run in threads beside a worker's loop.

The loop serves every connection of a worker, so a route that sleeps, computes or waits for a
database must not run on the loop. At most `http_threads` threads run such routes. The request's
body is read on the loop, which owns the client's socket. A small body of known length is read
before a thread is taken, so slow clients hold threads only with larger or chunked bodies. The
pieces of a streamed answer are made beside the loop, piece by piece. Under WSGI servers with a
thread for each request, a route runs in the request's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

from falcon import Request, Response

from shmserve import waiting
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.frontends.heap_budget import FREE
from shmserve.frontends.http.server.response import BufferBody
from shmserve.frontends.side_threads import ExtensionThreads

_PIECE = 8192  # bytes per read from a stream with a `read` method
_END = object()

_Respond = Callable[..., None]
_Find = Callable[[Request], _Respond | None]


class BlockingRoutes:
    """Runs code that may block, for one application of one process."""

    def __init__(self, settings: Settings) -> None:
        threads = ExtensionThreads(
            settings.http_threads, "http_threads", settings.request_timeout_s
        )
        self.call = threads.call

    def resource(self, resource: object) -> object:
        """Return Falcon's resource with responders that run beside the loop."""
        return _Resource(resource, self.responder)

    def responder(self, respond: _Respond) -> _Respond:
        """Return a responder that runs `respond` beside the loop."""

        @functools.wraps(respond)
        def run(req: Request, resp: Response, **params: Any) -> None:
            waiter = waiting.installed.waiter
            if waiter is None:
                respond(req, resp, **params)
                return
            body = _on_loop(req, waiter)
            if req.content_length is not None and req.content_length <= FREE:
                body.gather()
            self.call(_respond, respond, req, resp, params)
            if resp.stream is not None and not isinstance(resp.stream, BufferBody):
                resp.stream = _BesideStream(resp.stream, self.call)

        return run

    def finder(self, find: _Find) -> _Find:
        """Return a finder of responders. Both the finder and its responders run beside the loop."""

        def find_beside(req: Request) -> _Respond | None:
            waiter, body = waiting.installed.waiter, req.env["wsgi.input"]
            if waiter is not None:
                _on_loop(req, waiter)
            respond = self.call(find, req)
            if respond is None:
                req.stream = req.env["wsgi.input"] = body  # the next responder may run on the loop
                return None
            return self.responder(respond)

        return find_beside


def _on_loop(req: Request, waiter: waiting.ThreadWaiter) -> _LoopBody:
    """Return the request's body in a form readable beside the loop. Wrap the body unless already
    wrapped."""
    body = req.env["wsgi.input"]
    if not isinstance(body, _LoopBody):
        body = req.stream = req.env["wsgi.input"] = _LoopBody(body, waiter.on_loop)
    return body


def _respond(respond: _Respond, req: Request, resp: Response, params: dict[str, Any]) -> None:
    respond(req, resp, **params)
    if resp.media is not None:
        resp.render_body()  # Falcon keeps the rendered bytes of `media`


def _pieces(stream: Any) -> Iterator[bytes]:
    read = getattr(stream, "read", None)
    return iter(stream) if read is None else iter(partial(read, _PIECE), b"")


class _Resource:
    """A resource with all responders wrapped, suffixed responders included."""

    def __init__(self, resource: object, wrap: Callable[[_Respond], _Respond]) -> None:
        for name in dir(resource):
            if name.startswith("on_"):
                setattr(self, name, wrap(getattr(resource, name)))


class _LoopBody:
    """The request's body: methods are called beside the loop and run on the loop."""

    def __init__(self, body: Any, on_loop: Callable[..., Any]) -> None:
        self._body = body
        self._on_loop: Callable[..., Any] | None = on_loop

    def gather(self) -> None:
        """Receive the rest on the loop. From then on, methods run in the thread of their caller."""
        self._body, self._on_loop = BytesIO(self._body.read()), None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._body, name)
        if self._on_loop is None or not callable(attribute):
            return attribute
        return partial(self._on_loop, attribute)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")


class _BesideStream:
    """An answer in pieces: each piece is made beside the loop, which sends the piece."""

    def __init__(self, stream: Any, call: Callable[..., Any]) -> None:
        self._stream = stream
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        pieces = self._call(_pieces, self._stream)
        while (piece := self._call(next, pieces, _END)) is not _END:
            yield piece

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is None:
            return
        try:
            self._call(close)
        except Unavailable:  # the stream must give back its resources, even on the loop
            close()
