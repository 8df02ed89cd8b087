"""Client socket with TLS, used by connections like a plain socket.

TLS has neither the flags nor `sendmsg` of plain sockets, so both are emulated. One difference
remains: bytes peeked at have been decrypted, so later calls take these bytes from the object
instead of the kernel.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shmserve import waiting
from shmserve.frontends.http.server.loop_socket import GreenletSocket

_RECORD = 16 << 10  # bytes of the largest TLS record
_AT_ONCE = 1 << 20  # bytes until other connections have a turn
_READABLE, _WRITABLE = select.POLLIN, select.POLLOUT


class TlsSocket(ssl.SSLSocket):
    """Client socket with TLS, made by `secure`. Waits happen in the plain socket below."""

    _ahead = b""  # bytes decrypted and not taken yet
    _since_pause = 0  # bytes since the last pause
    _sslobj: Any  # of the base class; None before and after TLS
    _plain: GreenletSocket  # the original socket, without its descriptor

    def handshake(self) -> None:
        """Run the handshake. Raise OSError if the handshake fails."""
        self._patiently(self.do_handshake)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            return self._glance()
        if flags & socket.MSG_PEEK:  # for a head; other connections have a turn before
            if self._ahead or self.pending():
                waiting.pause()
            else:
                self._plain.await_ready(_READABLE)
        if not self._ahead:
            self._ahead = self._decrypt(buflen)
        data = self._ahead[:buflen]
        if flags & socket.MSG_PEEK:
            return data
        self._ahead = self._ahead[buflen:]
        if not flags & socket.MSG_WAITALL:
            return data
        pieces, left = [data], buflen - len(data)
        while left and pieces[-1]:
            pieces.append(self._decrypt(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive and decrypt straight into `buffer`; with MSG_WAITALL until `buffer` is full or
        the client has ended."""
        view = memoryview(buffer).cast("B")[: nbytes or None]
        count = min(len(view), len(self._ahead))
        view[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        while count < len(view) and (not count or flags & socket.MSG_WAITALL):
            received = self._decrypt_into(view[count:])
            if not received:
                break
            count += received
        return count

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send all buffers: large buffers unjoined, small buffers joined."""
        small: list[Any] = []
        sent, room = 0, _RECORD
        for buffer in buffers:
            size = len(buffer)
            if size > room:
                sent += self._encrypt(b"".join(small))
                small, room = [], _RECORD
            if size > room:
                sent += self._encrypt(buffer)
            else:
                small.append(buffer)
                room -= size
        return sent + self._encrypt(b"".join(small))

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._encrypt(data)

    def shutdown(self, how: int) -> None:
        """Shut down the TCP connection, from any thread. Bytes that have arrived can still be
        read."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Send the end of TLS to the client, if possible without waiting, and close the socket.
        After `shutdown` the end of TLS cannot be sent: the client has seen the end of the
        connection instead."""
        with suppress(OSError, ValueError):
            self.unwrap()
        if "_plain" in self.__dict__:  # missing if `secure` failed
            self._plain.close()
        super().close()

    def _glance(self) -> bytes:
        """Peek without waiting (MSG_PEEK | MSG_DONTWAIT): return any byte if bytes are there,
        encrypted or not; return b"" if the client has ended.

        Raises:
            BlockingIOError: neither bytes nor an end have arrived.
        """
        if self._ahead or self.pending():
            return self._ahead or b"\0"
        poll = select.poll()
        poll.register(self.fileno(), _READABLE | select.POLLRDHUP)
        events = poll.poll(0)
        if not events:
            raise BlockingIOError
        ended = events[0][1] & (select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return b"" if ended else b"\0"

    def _decrypt(self, size: int) -> bytes:
        data: bytes = self._patiently(self.read, size)
        self._count(len(data))
        return data

    def _decrypt_into(self, view: memoryview) -> int:
        count: int = self._patiently(self.read, len(view), view)
        self._count(count)
        return count

    def _encrypt(self, data: Any) -> int:
        view, sent = memoryview(data).cast("B") if len(data) else b"", 0
        while sent < len(view):
            count: int = self._patiently(self.send, view[sent : sent + _AT_ONCE])
            self._count(count)
            sent += count
        return sent

    def _patiently(self, attempt: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `attempt`, repeated until TLS needs nothing more from the
        client."""
        if self._sslobj is None:  # the client left before TLS began, or ended TLS
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        while True:
            try:
                return attempt(*args)
            except ssl.SSLWantReadError:
                self._plain.await_ready(_READABLE)
            except ssl.SSLWantWriteError:
                self._plain.await_ready(_WRITABLE)

    def _count(self, nbytes: int) -> None:
        """Pause once in a while, so that other connections go on however fast the client is."""
        self._since_pause += nbytes
        if self._since_pause >= _AT_ONCE:
            self._since_pause = 0
            waiting.pause()


def secure(sock: GreenletSocket, context: ssl.SSLContext) -> TlsSocket:
    """Return the connection with TLS, which begins with a handshake. Do not use `sock` any
    more."""
    sock.setblocking(False)
    context.sslsocket_class = TlsSocket
    tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    assert isinstance(tls, TlsSocket)
    tls._plain = sock
    return tls
