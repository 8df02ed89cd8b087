"""Client connection of HTTP: its greenlet, its deadlines, its requests one after another.

The code is synchronous: the socket gives way to the worker's loop where a call would block.
`watch` holds the connection's phase and deadline. At the deadline the socket is shut down, and the
greenlet then reads an end of file or fails to send.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from math import inf
from time import monotonic
from typing import Any

from gunicorn.http.errors import NoMoreData, ParseException

from shmserve import waiting
from shmserve.core.caller import Caller
from shmserve.errors import Unavailable
from shmserve.frontends.connections import plain_http
from shmserve.frontends.http.server import environ as environs
from shmserve.frontends.http.server.chunked import ChunkedBody
from shmserve.frontends.http.server.error_responses import refusal, status_of
from shmserve.frontends.http.server.head import HEAD, Head, Heads
from shmserve.frontends.http.server.loop_socket import GreenletSocket
from shmserve.frontends.http.server.request_body import PART, SCRAP, RequestBody, too_large
from shmserve.frontends.http.server.response import Buffer, HttpResponse, parts_of
from shmserve.frontends.http.server.tls_socket import TlsSocket, secure
from shmserve.frontends.http.server.worker_context import ServingContext
from shmserve.frontends.request_ids import HEADER, IN_ENVIRON, request_id
from shmserve.log_fields import log_fields
from shmserve.transport.trust.peer_credentials import caller_of
from shmserve.transport.trust.tls import subject_of

IDLE, SEND, LINGER = "idle", "send", "linger"

_DRAINED = 1 << 20  # bytes of an unread body that are drained to keep the connection
_LINGER_S = 2.0
_IOV_MAX = 1024

_CUT_GRACE_S = 5.0


class ClientGone(Exception):
    """The client cannot be answered any more."""


class HttpConnection:
    """An accepted socket and its requests.

    Args:
        service: state shared by all connections of the worker.
        open_socket: makes the socket, whose waits end at this connection's deadlines.
        client, server: addresses of the two ends.

    Attributes:
        sock: the client's socket, also used to identify the peer.
        watch: phase and deadline (monotonic) of the wait for the client; None while the server
            works.
        expired: whether the deadline has passed, or the worker wants this idle connection closed.
    """

    __slots__ = (
        "_body", "_caller", "_client", "_heads", "_server", "_service", "expired", "settings",
        "sock", "watch",
    )  # fmt: skip

    def __init__(
        self,
        service: ServingContext,
        open_socket: Callable[[HttpConnection], socket.socket],
        client: environs.Address,
        server: environs.Address,
    ) -> None:
        self._service = service
        self._client = client
        self._server = server
        self._caller: Caller | None = None
        self.sock = open_socket(self)
        self.settings = service.settings
        self.expired = False
        self._body: RequestBody | None = None
        self._heads = self._begin()
        self.watch: tuple[str, float] | None = None
        self.wait(IDLE, self.settings.idle_timeout_s)

    def _begin(self) -> Heads:
        service, client = self._service, self._client
        environ = environs.connection_environ(service.environ, self, client, self._server)
        return Heads(self, service.cfg, client, environ)

    def wait(self, phase: str, seconds: float) -> None:
        self.watch = (phase, monotonic() + seconds)

    def alive(self) -> bool:
        """Return True if the client is still there, as far as the kernel knows.

        A client that has ended sending may still read. Only Unix sockets show the difference: over
        TCP such a client counts as gone. Requests received ahead are signs of life, although the
        kernel does not have them any more.
        """
        if self._heads.unreader.buf.tell():
            return True
        try:
            if self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            return True
        except OSError:
            return False
        if self.sock.family != socket.AF_UNIX:
            return False
        poll = select.poll()
        poll.register(self.sock, 0)
        return not poll.poll(0)  # poll always reports POLLHUP

    def caller(self) -> Caller:
        """Return the caller at the other end, looked up on first use."""
        if self._caller is None:
            self._caller = caller_of(self.sock)
        return self._caller

    def lasting(self) -> bool:
        """Return True if the connection may serve another request after the current one."""
        service = self._service
        if not service.keep_alive or service.stopping or self.expired:
            return False
        body = self._body
        return body is None or body.finished or body.skippable(_DRAINED)

    def cut_if_overdue(self, now: float) -> None:
        """Shut the socket down if the client has exceeded its deadline. Call in the worker's
        thread, while the socket is certainly open."""
        watch = self.watch
        if watch is None:
            return
        phase, until = watch
        if phase == IDLE and self._service.stopping:
            # The next request of a busy client may be on its way. The answer to that request has
            # "Connection: close".
            until = min(until, self._service.stopping_at + self.settings.drain_idle_s)
        if now < until:
            return
        # Only reading ends now, so a request that has arrived is still answered. If the greenlet
        # is still in this phase at the second deadline, or is sending, both directions end.
        final = self.expired or phase in (SEND, LINGER)
        self.expired = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR if final else socket.SHUT_RD)
        if self.watch is watch:
            self.watch = (phase, now + _CUT_GRACE_S)

    @property
    def idle_since(self) -> float:
        """The time (monotonic) since which the connection waits for a request; infinite while a
        request is served or the connection is about to end."""
        watch = self.watch
        if watch is None or watch[0] != IDLE or self.expired:
            return inf
        return watch[1] - self.settings.idle_timeout_s

    def give_way(self) -> None:
        """End an idle connection to make room for another. A request that has arrived is still
        answered. Call in the worker's thread, as `cut_if_overdue`."""
        self.expired = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)

    def _has_unread(self) -> bool:
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    # Serving

    def serve(self) -> None:
        """Answer requests until the connection ends. The caller closes the socket."""
        certificates = self._service.certificates
        try:
            if certificates is not None and self._has_tls():
                due, context = certificates.due, certificates.context
                self._encrypt(waiting.beside(context) if due else context())
            while self._serve_one():
                self.watch = (IDLE, monotonic() + self.settings.idle_timeout_s)
        except (ClientGone, OSError, Unavailable):
            return

    def _has_tls(self) -> bool:
        """Return True if the address of the connection has TLS, where HTTP has certificates."""
        server = self._server
        return isinstance(server, tuple) and server[1] not in self._service.plain_ports

    def _encrypt(self, context: ssl.SSLContext) -> None:
        """Start TLS on the connection. The handshake has the time limit of a head. Raise ClientGone
        after the answer to a client that sends plain HTTP."""
        self.wait(HEAD, self.settings.head_timeout_s)
        log = self._service.log
        assert isinstance(self.sock, GreenletSocket)
        if plain_http.is_plain(self.sock.recv(1, socket.MSG_PEEK)):
            log.info("Refused a request from %s: plain HTTP without TLS", self._client)
            self.send([plain_http.ANSWER], len(plain_http.ANSWER))
            self._linger()
            raise ClientGone
        try:
            self.sock = tls = secure(self.sock, context)
            tls.handshake()
        except OSError as ex:
            reason = ex.reason if isinstance(ex, ssl.SSLError) else ex.strerror
            log.info("TLS with %s failed: %s", self._client, reason)
            raise
        if subject := subject_of(tls):
            log.info("TLS client %s: %s", self._client, subject)
        self._heads = self._begin()
        self.wait(IDLE, self.settings.idle_timeout_s)

    def _serve_one(self) -> bool:
        try:
            head = self._heads.next()
        except (ParseException, NoMoreData) as ex:
            self._refuse_head(ex)
            return False
        if head is None:
            return False
        body = self._body = self._open_body(head)
        self.watch = None
        service = self._service
        service.requests += 1
        if service.requests >= service.max_requests:
            service.hooks.retire()
        environ = head.environ.copy()
        environ["wsgi.input"] = body
        response = HttpResponse(self, head.request.method, head.request.version, not head.close)
        hooks = service.hooks
        begun = monotonic() if hooks.access else 0.0
        if hooks.before:
            hooks.before(head.request)
        try:
            answered = self._answer(environ, response)
        finally:
            response.status = response.status or "499 Client Gone"
            if hooks.access:
                elapsed = timedelta(seconds=monotonic() - begun)
                hooks.access(response, head.request, environ, elapsed)
            if hooks.after:
                hooks.after(head.request, environ, response)
        keep = answered and response.keep_alive
        if body.finished or (keep and body.drain(_DRAINED)):
            if not keep and self._has_unread():
                self._linger()
            return keep
        self._linger()
        return False

    def _answer(self, environ: dict[str, Any], response: HttpResponse) -> bool:
        result: Any = None
        try:
            result = self._service.wsgi(environ, response.start_response)
            response.send(result)
            return True
        except ClientGone:
            raise
        except Exception:
            uri, request = environ["RAW_URI"], request_id(environ.get(IN_ENVIRON))
            what, about = (response.method, uri), log_fields(request=request)
            self._service.log.exception("Error handling request %s %s", *what, extra=about)
        finally:
            close = getattr(result, "close", None)
            if close is not None:
                close()
        if not response.begun:
            response.status = "500"
            self._refuse(500, "internal error", f"{HEADER}: {request}")
        return False

    # Heads

    def _refuse_head(self, error: Exception) -> None:
        """Answer a malformed or late head. A client that ends within a head gets no answer."""
        if isinstance(error, NoMoreData) and not self.expired:
            return
        status, message = 408, "the request's head did not arrive in time"
        if not self.expired:
            status, message = status_of(error)
        self._service.log.info("Refused a request from %s: %s", self._client, message)
        self._refuse(status, message)
        self._linger()

    def _open_body(self, head: Head) -> RequestBody:
        """Return the request's body, and take the head's bytes from the kernel."""
        heads, length, start = self._heads, head.length, head.size
        if length > self.settings.max_request_bytes:
            self._refuse(413, too_large(self.settings).message)
            self._linger()
            raise ClientGone
        found, unreader = heads.found, heads.unreader
        if found:
            end = heads.take(head, isinstance(self.sock, TlsSocket))
            if end < 0:
                raise ClientGone
        if head.chunked:
            return ChunkedBody(self, head.request, unreader, head.expects)
        if found:
            left = start + length - end
            return RequestBody(self, left, found[start:end], left > 0 and head.expects)
        if not length:
            return RequestBody(self)
        ahead = unreader.take_buffered()
        unreader.unread(ahead[length:])
        ahead = ahead[:length]
        return RequestBody(self, length - len(ahead), ahead, head.expects)

    # Sending

    def send(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send all of the buffers. Raise ClientGone if the client did not take them in time."""
        settings = self.settings
        try:
            if nbytes > PART:
                self._send_parts(buffers)
            else:
                until = monotonic() + settings.send_timeout_s + nbytes / settings.min_bytes_per_s
                self.watch = (SEND, until)
                sent = self.sock.sendmsg(buffers[:_IOV_MAX])
                if sent < nbytes:
                    self._send_rest(buffers, sent)
        except OSError:
            raise ClientGone from None
        self.watch = None

    def _send_parts(self, buffers: Sequence[Buffer]) -> None:
        """Send part by part, so that the deadline grows with the bytes taken by the client."""
        settings = self.settings
        until = inf
        for part, nbytes in parts_of(buffers, PART):
            latest = monotonic() + settings.send_timeout_s
            until = min(until, latest) + nbytes / settings.min_bytes_per_s
            self.watch = (SEND, until)
            self._send_rest(part, 0)

    def _send_rest(self, buffers: Sequence[Buffer], sent: int) -> None:
        unsent = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        while unsent:
            if sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
                continue
            unsent[0] = unsent[0][sent:]
            sent = self.sock.sendmsg(list(islice(unsent, _IOV_MAX)))

    def _refuse(self, status: int, message: str, *fields: str) -> None:
        answer = refusal(status, message, *fields)
        self.send([answer], len(answer))

    def _linger(self) -> None:
        """Let the client read the last answer: closing now would reset the connection."""
        until = monotonic() + _LINGER_S
        self.watch = (LINGER, until)
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv_into(SCRAP) and monotonic() < until:
                waiting.pause()
        except OSError:
            pass
