"""Transports: a connection's socket, plain or with TLS. No function here waits.

Both classes have the same members. Each function raises BlockingIOError instead of waiting, and
OSError when the connection is lost.

- `sock`: the socket itself, from which the peer can be found.
- `receive` takes at most the given number of bytes, and returns no bytes at the end.
- `peek` returns at most `PEEK_BYTES` without removing the bytes, or None with TLS.
- `receive_into` fills one buffer after another, as `socket.recvmsg_into`; with TLS the first only.
- `send` takes buffers, and returns the number of bytes taken.
- `pending`: True if the transport has buffered bytes that epoll does not report.
- `more`: True if more bytes may be available even after a short receive.
- `ready`: True if data can be sent. False until a TLS handshake is complete.

TLS is implemented twice on purpose. HTTP's `TlsSocket` lets its greenlet wait and decrypts into
the memory of a body, since HTTP's parser asks for bytes. Here the loop calls whenever bytes have
arrived. A greenlet for each HTTP/2 connection would cost two switches for each receive and a stack
for each idle connection.
"""

import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from shmserve.frontends.connections import plain_http
from shmserve.frontends.http2 import Buffer
from shmserve.transport.trust.tls import subject_of

_log = logging.getLogger("shmserve.grpc")

_TLS_SEND_BYTES = 256 << 10  # bytes joined at a time, since TLS takes one buffer
_PROTOCOL = "h2"
_PLAIN_BYTES = 64 << 10  # bytes read of a client that does not speak TLS
PEEK_BYTES = 4 << 10  # bytes to peek at where a message with large tensors is expected


class PlainTransport:
    """A socket without TLS: the socket's own functions, without wrappers."""

    pending = more = False
    ready = True

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.receive = sock.recv
        self.peek = partial(sock.recv, PEEK_BYTES, socket.MSG_PEEK)
        self.receive_into = sock.recvmsg_into
        self.send = sock.sendmsg


class TlsTransport:
    """A socket with TLS. The handshake runs while receiving."""

    more = True  # a receive returns one TLS record at most

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = context.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self.sock: socket.socket = self._tls
        self._shaken = False
        self._greeted = False  # whether the client's first byte was looked at

    def receive(self, limit: int) -> bytes:
        try:
            self._shake()
            return self._tls.recv(limit)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def peek(self) -> None:
        return None

    def receive_into(self, places: Sequence[memoryview]) -> tuple[int]:
        try:
            return (self._tls.recv_into(places[0]),)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, buffers: Sequence[Buffer]) -> int:
        if not self._shaken:
            raise BlockingIOError  # sent after the handshake, which runs while receiving
        try:
            return self._tls.send(_joined(buffers))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def ready(self) -> bool:
        return self._shaken

    @property
    def pending(self) -> bool:
        return self._shaken and self._tls.pending() > 0

    def _shake(self) -> None:
        if self._shaken:
            return
        if not self._greeted:
            if plain_http.is_plain(socket.socket.recv(self._tls, 1, socket.MSG_PEEK)):
                self._refuse_plain()
            self._greeted = True
        self._tls.do_handshake()
        if self._tls.selected_alpn_protocol() != _PROTOCOL:
            raise ConnectionAbortedError("the client does not speak HTTP/2")
        if subject := subject_of(self._tls):
            _log.info("TLS client %s: %s", self._tls.getpeername()[0], subject)
        self._shaken = True

    def _refuse_plain(self) -> NoReturn:
        """Answer a client that does not speak TLS. Raise ConnectionAbortedError."""
        with suppress(OSError):
            socket.socket.send(self._tls, plain_http.ANSWER)
            socket.socket.shutdown(self._tls, socket.SHUT_WR)
            # Bytes left unread would take the answer back; a client that waits sends no more
            socket.socket.recv(self._tls, _PLAIN_BYTES)
        raise ConnectionAbortedError("the client does not speak TLS")


ConnectionTransport = PlainTransport | TlsTransport


def _joined(buffers: Sequence[Buffer]) -> bytes:
    """Return the first buffers joined, with as many bytes as one call takes."""
    parts: list[Buffer] = []
    room = _TLS_SEND_BYTES
    for buffer in buffers:
        part = buffer if len(buffer) <= room else memoryview(buffer)[:room]
        parts.append(part)
        room -= len(part)
        if not room:
            break
    return b"".join(parts)
