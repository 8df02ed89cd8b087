"""A connection's socket, plain or with TLS; nothing here ever waits."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from shmserve.frontends.http2 import Buffer
from shmserve.transport.tls import subject_of

_log = logging.getLogger("shmserve.grpc")

_TLS_SEND_BYTES = 256 << 10  # joined at a time, since TLS takes one buffer
_PROTOCOL = "h2"


class ConnectionTransport(Protocol):
    """What a connection does with its socket. Everything raises BlockingIOError where it would
    wait, and OSError when the connection is gone.

    Attributes:
        sock: the socket itself, for who is at its other end.
    """

    sock: socket.socket

    def receive(self, most: int) -> bytes:
        """Some bytes; none at the end."""
        ...

    def peek(self, most: int) -> bytes | None:
        """As `receive`, of bytes that are received again; None: that cannot be done."""
        ...

    def receive_into(self, place: memoryview, beyond: memoryview | None) -> int:
        """As `receive`, into `place` and, if that is full, `beyond`; how many."""
        ...

    def send(self, buffers: Sequence[Buffer]) -> int:
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
    """The socket as it is."""

    pending = more = False
    ready = True

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.receive = sock.recv

    def peek(self, most: int) -> bytes:
        return self.sock.recv(most, socket.MSG_PEEK)

    def receive_into(self, place: memoryview, beyond: memoryview | None) -> int:
        if beyond is None:
            return self.sock.recv_into(place)
        return self.sock.recvmsg_into((place, beyond))[0]

    def send(self, buffers: Sequence[Buffer]) -> int:
        return self.sock.sendmsg(buffers) if len(buffers) > 1 else self.sock.send(buffers[0])


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

    def peek(self, most: int) -> None:
        return None

    def receive_into(self, place: memoryview, beyond: memoryview | None) -> int:
        try:
            return self._tls.recv_into(place)
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
