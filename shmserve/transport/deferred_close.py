"""Deferred close of descriptors that clients have passed.

`close` of a file may wait for the server of its file system; with FUSE this server can be the
client itself. `close` of a TCP socket with SO_LINGER may wait for the socket's other end. The
kernel also closes descriptors by itself: in a receive without room for them, and in the close of a
socket with unread messages. So a thread of its own closes descriptors that may be anything but
memory, and the sockets on which such descriptors may wait. While the thread is busy, further
descriptors wait with their senders. Once it is stuck, they are refused. Each user has a thread of
its own, so a user's descriptors delay that user alone.
"""

import array
import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterable

# Far more than a burst leaves waiting for the thread's turn, and far below the process's limit of
# descriptors.
_MANY = 256
_STUCK_S = 1.0  # a close that has taken so long may never end
_IDLE_S = 1.0  # after which a thread without descriptors ends
_MAX_RIGHTS = 253  # descriptors that one message can carry on Linux (SCM_MAX_FD)
ALL_RIGHTS = socket.CMSG_SPACE(_MAX_RIGHTS * 4)
_ANY_ANCILLARY = ALL_RIGHTS + socket.CMSG_SPACE(12)  # descriptors and credentials
_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_NO_LINGER = struct.pack("ii", 0, 0)


class DeferredClose:
    """Closes descriptors in a thread, which runs while there are descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[int | socket.socket] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since = 0.0  # when the present close began, or the queue had a first descriptor

    @property
    def busy(self) -> bool:
        """Return whether too many descriptors wait to be closed."""
        return self._queue.qsize() >= _MANY

    @property
    def stuck(self) -> bool:
        """Return whether too many descriptors wait for one close that does not end."""
        return self.busy and time.monotonic() > self._since + _STUCK_S

    def close(self, fds: Iterable[int]) -> None:
        """Queue descriptors for the closing thread."""
        for fd in fds:
            self._put(fd)

    def close_socket(self, sock: socket.socket) -> None:
        """End a Unix socket of this process at once. Queue the socket for the closing thread, with
        all unread messages, or a listener with all connections not accepted."""
        with contextlib.suppress(OSError):  # the peer is gone already
            sock.shutdown(socket.SHUT_RDWR)
        self._put(sock)

    def _put(self, closing: int | socket.socket) -> None:
        if self._queue.empty():
            self._since = time.monotonic()
        self._queue.put(closing)
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="closer", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can start: the next call tries
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                closing = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            self._since = time.monotonic()
            # After an OSError, Linux has freed the descriptor all the same.
            with contextlib.suppress(OSError, MemoryError):
                if isinstance(closing, int):
                    _close(closing)
                else:
                    with closing:
                        _take_unread(closing)


def _take_unread(sock: socket.socket) -> None:
    """Close the descriptors of a socket's unread messages. The socket takes no more messages.
    Raise OSError for a listener."""
    # Credentials tell an empty message from the end.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    while True:
        try:
            _, ancillary, *_ = sock.recvmsg(1, _ANY_ANCILLARY, _FLAGS)
        except ConnectionResetError:  # Linux reports this once, before the peer's last messages
            continue
        if not ancillary:
            return
        for _, kind, rights in ancillary:
            for fd in array.array("i", rights if kind == socket.SCM_RIGHTS else b""):
                with contextlib.suppress(OSError):
                    _close(fd)


def _close(fd: int) -> None:
    try:
        sock = socket.socket(fileno=fd)
    except OSError:  # no socket
        os.close(fd)
        return
    with sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
