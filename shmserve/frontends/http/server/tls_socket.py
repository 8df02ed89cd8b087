"""A client's socket with TLS, for those who use sockets as connections here do.

The flags and `sendmsg`, which TLS does not know, mean what they mean of a plain socket, except
that what was looked at has been decrypted, so it is taken from here and no more from the kernel.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from shmserve import waiting
from shmserve.frontends.http.server.loop_socket import GreenletSocket

_RECORD = 16 << 10  # the largest
_AT_ONCE = 1 << 20  # bytes, until others have their turn
_READABLE, _WRITABLE = select.POLLIN, select.POLLOUT


class TlsSocket(ssl.SSLSocket):
    """Made by `secure`. It does not block: where it has to wait, the socket below does."""

    _ahead = b""  # decrypted and not taken yet
    _since_pause = 0  # bytes
    _sslobj: Any  # the base's; None: there is no TLS yet, or no more
    _plain: GreenletSocket  # which it is made of, and which has no descriptor any more

    def handshake(self) -> None:
        """Raises OSError: it failed."""
        self._patiently(self.do_handshake)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            return self._glance()
        if flags & socket.MSG_PEEK:  # for a head, before which others have their turn
            if self._ahead or self.pending():
                waiting.pause()
            else:
                self._plain.await_ready(_READABLE)
        if not self._ahead:
            self._ahead = self._decrypt(buflen)
        found = self._ahead[:buflen]
        if flags & socket.MSG_PEEK:
            return found
        self._ahead = self._ahead[buflen:]
        if not flags & socket.MSG_WAITALL:
            return found
        pieces, left = [found], buflen - len(found)
        while left and pieces[-1]:
            pieces.append(self._decrypt(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """With MSG_WAITALL until `buffer` is full or the client has ended. Bytes are decrypted to
        where they belong."""
        view = memoryview(buffer).cast("B")[: nbytes or None]
        count = min(len(view), len(self._ahead))
        view[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        while count < len(view) and (not count or flags & socket.MSG_WAITALL):
            got = self._decrypt_into(view[count:])
            if not got:
                break
            count += got
        return count

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send all of them: large ones from where they are, small ones joined."""
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
        """Of the socket below; from any thread. What has come can still be read."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Tell the client that this is the end, if it can be told without waiting. After
        `shutdown` it cannot: that has told it of the end of the connection, not of TLS."""
        try:
            self.unwrap()
        except (OSError, ValueError):
            pass
        if "_plain" in self.__dict__:  # not if `secure` fails
            self._plain.close()
        super().close()

    def _glance(self) -> bytes:
        """What MSG_PEEK | MSG_DONTWAIT is used for: bytes if there are any, encrypted or not; none
        if the client has ended.

        Raises:
            BlockingIOError: neither.
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

    def _decrypt(self, most: int) -> bytes:
        data: bytes = self._patiently(self.read, most)
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
        """What comes of it as soon as it needs nothing more from the client."""
        if self._sslobj is None:  # the client was gone before there could be TLS, or ended it
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        while True:
            try:
                return attempt(*args)
            except ssl.SSLWantReadError:
                self._plain.await_ready(_READABLE)
            except ssl.SSLWantWriteError:
                self._plain.await_ready(_WRITABLE)

    def _count(self, nbytes: int) -> None:
        """Let others go on once in a while, however fast the client is."""
        self._since_pause += nbytes
        if self._since_pause >= _AT_ONCE:
            self._since_pause = 0
            waiting.pause()


def secure(sock: GreenletSocket, context: ssl.SSLContext) -> TlsSocket:
    """The same connection with TLS, which begins with a handshake; `sock` is used no more."""
    sock.setblocking(False)
    context.sslsocket_class = TlsSocket
    tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    assert isinstance(tls, TlsSocket)
    tls._plain = sock
    return tls
