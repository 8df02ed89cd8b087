"""One client connection: its thread, its deadlines, its requests one after another.

The socket blocks and has no timeout. Instead the connection says in `watch` what it
is doing and until when; the worker's main thread shuts the socket down if that passes,
and the thread then reads an end of file or fails to send.

A head is looked at before it is taken (MSG_PEEK). So a body that did not come along
with its head entirely stays in the kernel, and is received into its place in memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import (
    InvalidRequestLine,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
    ParseException,
)
from gunicorn.http.message import Request
from gunicorn.http.unreader import Unreader

from shmserve.config import Settings
from shmserve.frontends.http import environ as environs
from shmserve.frontends.http.body import SCRAP, Body, ChunkedBody, LengthBody, too_large
from shmserve.frontends.http.refusals import refusal, status_of
from shmserve.frontends.http.response import Buffer, Response, size_of

IDLE, HEAD, SEND, LINGER = "idle", "head", "send", "linger"

_PEEK = 8192  # a request that fits is taken in two system calls, its body with the head
_CACHED_HEADS = 4
_CACHED_HEAD_BYTES = 2048
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
        self.proxied = cfg.proxy_protocol != "off"
        self.stopping = False
        self.access: Callable[..., None] | None = None
        self.before: Callable[[Any], None] | None = None
        self.after: Callable[[Any, dict[str, Any], Any], None] | None = None
        self.count: Callable[[], None] = lambda: None


class Head:
    """A parsed head, good for every request of the connection that begins with these bytes."""

    __slots__ = ("chunked", "close", "environ", "expects", "length", "request", "size")

    def __init__(self, request: Any, environ: dict[str, Any], size: int) -> None:
        reader = request.body.reader
        self.request = request
        self.environ = environ
        self.size = size
        self.chunked = isinstance(reader, ChunkedReader)
        self.length: int = 0 if self.chunked else reader.length
        self.close: bool = request.should_close()
        self.expects: bool = request._expected_100_continue


class _SocketUnreader(Unreader):  # type: ignore[misc]
    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def chunk(self, size_hint: int | None = None) -> bytes:
        return self._sock.recv(min(max(size_hint or 0, 1 << 16), 1 << 20))


class Connection:
    """Serves one accepted socket.

    Attributes:
        sock: the client's socket, also for those who want to know the peer.
        watch: what is awaited from the client and until when; None while the server works.
        expired: the deadline passed, or the worker wants this idle connection closed.
    """

    __slots__ = (
        "_client",
        "_environ",
        "_heads",
        "_number",
        "_peeked",
        "_service",
        "_unreader",
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
        self._unreader = _SocketUnreader(sock)
        self._heads: dict[bytes, Head] = {}
        self._number = 0
        self._peeked = b""
        self.sock = sock
        self.settings = service.settings
        self.expired = False
        self._environ = environs.connection_environ(service.environ, self, client, server)
        self.watch: tuple[str, float] | None = None
        self._wait(IDLE, self.settings.idle_timeout_s)

    def _wait(self, phase: str, seconds: float) -> None:
        self.watch = (phase, monotonic() + seconds)

    def alive(self) -> bool:
        """Whether the client is still there, as far as the kernel knows."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def lasting(self) -> bool:
        """Whether there may be another request after this one."""
        service = self._service
        return service.keep_alive and not (service.stopping or self.expired)

    # Serving

    def serve(self) -> None:
        """Answer requests until the connection ends. Closing is the caller's business."""
        try:
            while self._serve_one():
                self._wait(IDLE, self.settings.idle_timeout_s)
        except (ClientGone, OSError):
            return

    def _serve_one(self) -> bool:
        head = self._next_head()
        if head is None:
            return False
        body = self._body(head)
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
        if body.finished or (response.keep_alive and body.drain(_DRAINED)):
            return answered and response.keep_alive
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
            if not response.begun:
                response.status = "500"
                self._refuse(500, "internal error")
            return False
        finally:
            close = getattr(result, "close", None)
            if close is not None:
                close()

    # Heads

    def _next_head(self) -> Head | None:
        try:
            data = self._read_head()
            if not data:
                return None
            head = self._heads.get(data)
            return self._parse(data) if head is None else head
        except (ParseException, NoMoreData) as ex:
            if isinstance(ex, NoMoreData) and not self.expired:
                return None
            status, message = 408, "the request's head did not arrive in time"
            if not self.expired:
                status, message = status_of(ex)
            self._service.log.info("Refused a request from %s: %s", self._client, message)
            self._refuse(status, message)
            return None

    def _parse(self, data: bytes) -> Head:
        if len(data) > self.settings.max_head_bytes:
            raise LimitRequestHeaders("head too large")
        self._number += 1
        self._unreader.unread(data)
        request = Request(self._service.cfg, self._unreader, self._client, self._number)
        head = Head(request, environs.request_environ(self._environ, request), len(data))
        if not self._service.proxied and not head.chunked and len(data) <= _CACHED_HEAD_BYTES:
            if len(self._heads) >= _CACHED_HEADS:
                self._heads.clear()
            self._heads[data] = head
        return head

    def _read_head(self) -> bytes:
        """The bytes of the next head, its empty line included; b"" at the end.

        Nothing beyond the head is taken from the kernel, except after a chunked body.
        """
        self._peeked = b""
        data = self._unreader.take_buffered()
        if self._service.proxied:  # where such a head ends only the parser can tell
            self._wait(HEAD, self.settings.head_timeout_s)
            return data or self._unreader.chunk()
        if not data:
            data = self.sock.recv(_PEEK, socket.MSG_PEEK)
            end = data.find(b"\r\n\r\n") + 4
            if end > 3:
                self._peeked = data
                return data[:end]
            data = self._take(len(data))
        if not data:
            return b""
        return self._gather_head(data)

    def _gather_head(self, data: bytes) -> bytes:
        """A head that comes in several pieces, or that had been read ahead."""
        self._wait(HEAD, self.settings.head_timeout_s)
        gathered = bytearray(data)
        while (end := gathered.find(b"\r\n\r\n")) < 0:
            _check_partial(gathered, self.settings.max_head_bytes)
            more = self.sock.recv(_PEEK, socket.MSG_PEEK)
            if not more:
                raise NoMoreData(bytes(gathered))
            edge = bytes(gathered[-3:])
            found = (edge + more).find(b"\r\n\r\n")
            gathered += self._take(found + 4 - len(edge) if found >= 0 else len(more))
        self._unreader.unread(bytes(gathered[end + 4 :]))
        return bytes(gathered[: end + 4])

    def _take(self, count: int) -> bytes:
        return self.sock.recv(count, socket.MSG_WAITALL) if count else b""

    def _body(self, head: Head) -> Body:
        """The body, with which the head's bytes are taken from the kernel."""
        length, peeked, start = head.length, self._peeked, head.size
        if length > self.settings.max_request_bytes:
            self._refuse(413, too_large(self.settings).message)
            raise ClientGone
        if peeked:
            whole = start + length
            along = length and whole <= len(peeked)
            self.sock.recv_into(SCRAP, whole if along else start, socket.MSG_WAITALL)
            if head.chunked:
                return ChunkedBody(self, head.request, self._unreader, head.expects)
            if along:
                return Body(self, peeked[start:whole])
            return LengthBody(self, length, b"", head.expects) if length else Body(self)
        if head.chunked:
            return ChunkedBody(self, head.request, self._unreader, head.expects)
        if not length:
            return Body(self)
        ahead = self._unreader.take_buffered()
        self._unreader.unread(ahead[length:])
        ahead = ahead[:length]
        return LengthBody(self, length - len(ahead), ahead, head.expects)

    # Sending

    def send(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send all of the buffers.

        Raises:
            ClientGone: it did not take them, or not in time.
        """
        settings = self.settings
        self._wait(SEND, settings.send_timeout_s + nbytes / settings.min_bytes_per_s)
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
        self._linger()

    def _linger(self) -> None:
        """Let the client read the last answer: closing now would reset the connection."""
        self._wait(LINGER, _LINGER_S)
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv_into(SCRAP):
                pass
        except OSError:
            pass


def _check_partial(data: bytearray, limit: int) -> None:
    """Refuse what can become no head, or none within the limit."""
    if data.count(b"\n") != data.count(b"\r\n"):
        raise InvalidRequestLine("bare LF")
    if len(data) >= limit:
        if b"\r\n" in data:
            raise LimitRequestHeaders("head too large")
        raise LimitRequestLine(len(data), limit)
