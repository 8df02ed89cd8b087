"""One client connection: its thread, its deadlines, its requests one after another.

The socket blocks and has no timeout. Instead the connection says in `watch` what it
is doing and until when; the worker's main thread shuts the socket down if that passes,
and the thread then reads an end of file or fails to send.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from gunicorn.http.errors import NoMoreData, ParseException

from shmserve.config import Settings
from shmserve.core.regions.region_book import Caller
from shmserve.frontends.http.server import environ as environs
from shmserve.frontends.http.server.chunked import ChunkedBody
from shmserve.frontends.http.server.error_responses import refusal, status_of
from shmserve.frontends.http.server.head import Head, Heads, discard
from shmserve.frontends.http.server.request_body import SCRAP, Body, LengthBody, too_large
from shmserve.frontends.http.server.response import Buffer, Response, size_of
from shmserve.transport.peer_credentials import caller_of

IDLE, SEND, LINGER = "idle", "send", "linger"

_DRAINED = 1 << 20  # a body left unread up to this does not cost the connection
_LINGER_S = 2.0
_IOV_MAX = 1024

WsgiApplication = Callable[[dict[str, Any], Any], Any]


class ClientGone(Exception):
    """The client cannot be answered any more."""


class Service:
    """What all connections of a worker share.

    Attributes:
        stopping: no connection is kept open any longer.
        access: called after each answer with response, request, environ and time taken.
        before, after: gunicorn's pre_request and post_request hooks, where configured.
        count: called for each request.
    """

    def __init__(self, cfg: Any, log: Any, settings: Settings, wsgi: WsgiApplication) -> None:
        self.cfg = cfg
        self.log = log
        self.settings = settings
        self.wsgi = wsgi
        self.environ = environs.process_environ(cfg)
        self.keep_alive = bool(cfg.keepalive)
        self.stopping = False
        self.access: Callable[..., None] | None = None
        self.before: Callable[[Any], None] | None = None
        self.after: Callable[[Any, dict[str, Any], Any], None] | None = None
        self.count: Callable[[], None] = lambda: None


class Connection:
    """Serves one accepted socket.

    Attributes:
        sock: the client's socket, also for those who want to know the peer.
        watch: what is awaited from the client and until when; None while the server works.
        expired: the deadline passed, or the worker wants this idle connection closed.
    """

    __slots__ = (
        "_body",
        "_caller",
        "_client",
        "_heads",
        "_service",
        "expired",
        "settings",
        "sock",
        "watch",
    )

    def __init__(
        self,
        service: Service,
        sock: socket.socket,
        client: environs.Address,
        server: environs.Address,
    ) -> None:
        self._service = service
        self._client = client
        self._caller: Caller | None = None
        self.sock = sock
        self.settings = service.settings
        self.expired = False
        self._body: Body | None = None
        environ = environs.connection_environ(service.environ, self, client, server)
        self._heads = Heads(self, service.cfg, client, environ)
        self.watch: tuple[str, float] | None = None
        self.wait(IDLE, self.settings.idle_timeout_s)

    def wait(self, phase: str, seconds: float) -> None:
        self.watch = (phase, monotonic() + seconds)

    def alive(self) -> bool:
        """Whether the client is still there, as far as the kernel knows."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def caller(self) -> Caller:
        """Who is at the other end, looked up when first asked."""
        if self._caller is None:
            self._caller = caller_of(self.sock)
        return self._caller

    def lasting(self) -> bool:
        """Whether there may be another request after this one."""
        service = self._service
        if not service.keep_alive or service.stopping or self.expired:
            return False
        return self._body is None or self._body.skippable(_DRAINED)

    def _has_unread(self) -> bool:
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    # Serving

    def serve(self) -> None:
        """Answer requests until the connection ends. Closing is the caller's business."""
        try:
            while self._serve_one():
                self.wait(IDLE, self.settings.idle_timeout_s)
        except (ClientGone, OSError):
            return

    def _serve_one(self) -> bool:
        head = self._next_head()
        if head is None:
            return False
        body = self._body = self._open_body(head)
        self.watch = None
        service = self._service
        service.count()
        environ = head.environ.copy()
        environ["wsgi.input"] = body
        response = Response(self, head.request.method, head.request.version, not head.close)
        begun = monotonic() if service.access else 0.0
        if service.before:
            service.before(head.request)
        try:
            answered = self._answer(environ, response)
        finally:
            response.status = response.status or "499 Client Gone"
            if service.access:
                elapsed = timedelta(seconds=monotonic() - begun)
                service.access(response, head.request, environ, elapsed)
            if service.after:
                service.after(head.request, environ, response)
        keep = answered and response.keep_alive
        if body.finished or (keep and body.drain(_DRAINED)):
            if not keep and self._has_unread():
                self._linger()
            return keep
        self._linger()
        return False

    def _answer(self, environ: dict[str, Any], response: Response) -> bool:
        result: Any = None
        try:
            result = self._service.wsgi(environ, response.start_response)
            response.send(result)
            return True
        except ClientGone:
            raise
        except Exception:
            uri = environ["RAW_URI"]
            self._service.log.exception("Error handling request %s %s", response.method, uri)
        finally:
            close = getattr(result, "close", None)
            if close is not None:
                close()
        if not response.begun:
            response.status = "500"
            self._refuse(500, "internal error")
        return False

    # Heads

    def _next_head(self) -> Head | None:
        try:
            return self._heads.next()
        except (ParseException, NoMoreData) as ex:
            if isinstance(ex, NoMoreData) and not self.expired:
                return None
            status, message = 408, "the request's head did not arrive in time"
            if not self.expired:
                status, message = status_of(ex)
            self._service.log.info("Refused a request from %s: %s", self._client, message)
            self._refuse(status, message)
            self._linger()
            return None

    def _open_body(self, head: Head) -> Body:
        """The body, with which the head's bytes are taken from the kernel."""
        heads, length, start = self._heads, head.length, head.size
        peeked = heads.peeked
        if length > self.settings.max_request_bytes:
            self._refuse(413, too_large(self.settings).message)
            self._linger()
            raise ClientGone
        if peeked:
            whole = start + length
            along = length and whole <= len(peeked)
            if not discard(self.sock, whole if along else start):
                raise ClientGone
            if head.chunked:
                return ChunkedBody(self, head.request, heads.unreader, head.expects)
            if along:
                return Body(self, peeked[start:whole])
            return LengthBody(self, length, b"", head.expects) if length else Body(self)
        if head.chunked:
            return ChunkedBody(self, head.request, heads.unreader, head.expects)
        if not length:
            return Body(self)
        ahead = heads.unreader.take_buffered()
        heads.unreader.unread(ahead[length:])
        ahead = ahead[:length]
        return LengthBody(self, length - len(ahead), ahead, head.expects)

    # Sending

    def send(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send all of the buffers.

        Raises:
            ClientGone: it did not take them, or not in time.
        """
        settings = self.settings
        self.wait(SEND, settings.send_timeout_s + nbytes / settings.min_bytes_per_s)
        try:
            sent = self.sock.sendmsg(buffers[:_IOV_MAX])
            if sent < nbytes:
                self._send_rest(buffers, sent)
        except OSError:
            raise ClientGone from None
        self.watch = None

    def _send_rest(self, buffers: Sequence[Buffer], sent: int) -> None:
        index = 0
        while True:
            while index < len(buffers) and sent >= size_of(buffers[index]):
                sent -= size_of(buffers[index])
                index += 1
            if index == len(buffers):
                return
            first = memoryview(buffers[index]).cast("B")[sent:]
            sent += self.sock.sendmsg([first, *buffers[index + 1 : index + _IOV_MAX]])

    def _refuse(self, status: int, message: str) -> None:
        answer = refusal(status, message)
        self.send([answer], len(answer))

    def _linger(self) -> None:
        """Let the client read the last answer: closing now would reset the connection."""
        self.wait(LINGER, _LINGER_S)
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv_into(SCRAP):
                pass
        except OSError:
            pass
