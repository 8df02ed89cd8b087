"""A log's stream that never keeps a process waiting, though nobody may read its other end."""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable
from typing import TextIO

_PATIENCE_S = 0.2  # for a reader that is merely behind


class DroppingStream:
    """Writes to the pipe or socket below another stream without blocking.

    When its reader has been behind for `_PATIENCE_S`, lines are dropped until it goes on, and then
    counted in a line of their own. Writes to anything else (a file, a terminal) are as they were.

    `line`: what makes a line of the log of that.

    Attributes:
        below: the stream that was there.
        dropped: lines since the last that was written.
    """

    def __init__(self, below: TextIO, line: Callable[[str], str] = str) -> None:
        self.below = below
        self._line = line
        self.dropped = 0
        self._socket: socket.socket | None = None
        self._fd = -1
        mode = os.fstat(below.fileno()).st_mode
        if stat.S_ISFIFO(mode):  # opened anew: others, too, have what is below, and may wait
            path = f"/proc/self/fd/{below.fileno()}"
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # another user's: then it is as it was
                return
        elif stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(below.fileno()))
            self._fd = self._socket.fileno()

    def write(self, text: str) -> None:
        """Write a line, or drop it. The logging module's lock lets one in at a time."""
        if self._fd < 0:
            self.below.write(text)
            return
        lost = f"({self.dropped} lines of the log were dropped)" if self.dropped else ""
        lost = f"{self._line(lost)}\n" if lost else ""
        left = memoryview((lost + text).encode(errors="replace"))
        whole = len(left)
        while left:
            try:
                left = left[self._write(left) :]
            except BlockingIOError:
                begun = len(left) < whole
                if (self.dropped and not begun) or not self._writable():
                    self.dropped += 1
                    return
        self.dropped = 0

    def flush(self) -> None:
        """What was written is gone already."""
        if self._fd < 0:
            self.below.flush()

    def close(self) -> None:
        """Give back what was opened; the stream below is its owner's."""
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd, self._socket = -1, None

    def _write(self, data: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        return os.write(self._fd, data)

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(_PATIENCE_S * 1000))
