"""A connection's socket, plain or with TLS; nothing here ever waits.

TLS stands twice, on purpose: HTTP's `TlsSocket` lets its greenlet wait and decrypts to where a body
belongs, as HTTP's parser asks for bytes. Here the loop calls whenever bytes have come. A greenlet
for each HTTP/2 connection would cost every receive two switches and each idle connection a stack.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from shmserve.frontends.http2 import Buffer
from shmserve.transport.trust.tls import subject_of

_log = logging.getLogger("shmserve.grpc")

_TLS_SEND_BYTES = 256 << 10  # joined at a time, since TLS takes one buffer
_PROTOCOL = "h2"
PEEK_BYTES = 4 << 10  # looked at where a message is expected that has large tensors


class ConnectionTransport(Protocol):
    """What a connection does with its socket. Everything raises BlockingIOError where it would
    wait, and OSError when the connection is gone.

    Attributes:
        sock: the socket itself, for who is at its other end.
    """

    sock: socket.socket

    @property
    def receive(self) -> Callable[[int], bytes]:
        """Some bytes, so many at most; none at the end."""
        ...

    @property
    def peek(self) -> Callable[[], bytes | None]:
        """As `receive`, of `PEEK_BYTES` that are received again; None: that cannot be done."""
        ...

    @property
    def receive_into(self) -> Callable[[Sequence[memoryview]], tuple[Any, ...]]:
        """As `socket.recvmsg_into`: receive into one place after another, or into the first."""
        ...

    @property
    def send(self) -> Callable[[Sequence[Buffer]], int]:
        """How many bytes of them were taken."""
        ...

    @property
    def pending(self) -> bool:
        """More was received than the system knows of."""
        ...

    @property
    def more(self) -> bool:
        """There may be more although less has come than was asked for."""
        ...

    @property
    def ready(self) -> bool:
        """Whether anything can be sent yet; it becomes so while reading."""
        ...


class PlainTransport:
    """The socket as it is: its own functions, with nothing between."""

    pending = more = False
    ready = True

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.receive = sock.recv
        self.peek = partial(sock.recv, PEEK_BYTES, socket.MSG_PEEK)
        self.receive_into = sock.recvmsg_into
        self.send = sock.sendmsg


class TlsTransport:
    """TLS; the handshake is made while reading."""

    more = True  # one record is given at a time

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = context.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self.sock: socket.socket = self._tls
        self._shaken = False

    def receive(self, most: int) -> bytes:
        try:
            self._shake()
            return self._tls.recv(most)
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
            raise BlockingIOError  # sent once it is, which is while reading
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
        self._tls.do_handshake()
        if self._tls.selected_alpn_protocol() != _PROTOCOL:
            raise ConnectionAbortedError("the client does not speak HTTP/2")
        if subject := subject_of(self._tls):
            _log.info("TLS client %s: %s", self._tls.getpeername()[0], subject)
        self._shaken = True


def _joined(buffers: Sequence[Buffer]) -> bytes:
    """The first of them, as many bytes as one call takes."""
    parts: list[Buffer] = []
    room = _TLS_SEND_BYTES
    for buffer in buffers:
        part = buffer if len(buffer) <= room else memoryview(buffer)[:room]
        parts.append(part)
        room -= len(part)
        if not room:
            break
    return b"".join(parts)
