"""Log writer: writes log lines without making a process wait for whoever reads them.

A pipe, terminal, socket or file below a log may stop taking lines at any moment. A look beforehand
does not help, because processes share such a file: two see the same room. O_NONBLOCK would change
the file for all its other users, and a file of another user cannot be opened anew. So a thread
writes, and only this thread waits. stdout and stderr stay as they are. The queue of a process holds
1 MiB of lines. At its end a process waits up to a second for its lines to go out.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_QUEUE_BYTES = 1 << 20
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes as a whole, not mixed with others' lines
_GATHER_S = 0.005  # for lines that go out with the first: waking the thread costs more than a line
_END_S = 1.0  # for lines to go out at the end of a process
_LOOK_S = 0.002  # between two looks whether they have


def lines_of(text: str) -> int:
    """Return the number of lines of a text, at least one."""
    return max(1, text.count("\n"))


class Dropped:
    """Count of lines that could not go out. `line` makes a line of the log of a text."""

    def __init__(self, line: Callable[[str], str]) -> None:
        self._count = 0
        self._line = line

    def before(self, text: str, limit: int | None = None) -> bytes:
        """Return `text`, behind a line that tells the count, if any. `limit`: most bytes of both,
        to which the text is cut at its beginning: the end of a traceback says what it was."""
        told = b""
        if self._count:
            told = self._line(f"({self._count} lines of the log were dropped)").encode() + b"\n"
        data = text.encode(errors="replace")
        if limit is not None:
            data = data[max(0, len(told) + len(data) - limit) :]
        return told + data

    def add(self, lines: int) -> None:
        """Count lines that were dropped."""
        self._count += lines

    def take(self) -> int:
        """Forget the count, which goes out. Return it."""
        count, self._count = self._count, 0
        return count


class LogWriter:
    """Writes lines to a descriptor in a thread of its own, from a bounded queue.

    Lines are dropped while the queue is full, and when the descriptor fails (the reader is gone, a
    disk is full). The next line that goes out tells how many. Any thread and any signal handler may
    write: the lock is reentrant, and nobody waits while holding it.
    """

    def __init__(self, fd: int, line: Callable[[str], str]) -> None:
        self._fd = fd
        self._dropped = Dropped(line)
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def write(self, text: str) -> None:
        """Have a text of one or more whole lines written, or drop it."""
        with self._lock:
            data = self._dropped.before(text)
            if self._queued and self._queued + len(data) > _QUEUE_BYTES:
                self._dropped.add(lines_of(text))
                return
            lines = self._dropped.take() + lines_of(text)  # lost if the write fails
            self._queued += len(data)
            self._queue.put((data, lines))
            if self._thread is None:
                self._start()
        if self._is_fork:  # a model's fork may end with `os._exit` right behind this line
            self.flush()

    def flush(self) -> None:
        """Wait until everything is written, at most a second, and not at all for a descriptor that
        has taken nothing for a second. For a process's end."""
        until = time.monotonic() + _END_S
        while self._queued and time.monotonic() < min(until, self._since + _END_S):
            time.sleep(_LOOK_S)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._queue: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
        self._queued = 0  # bytes
        self._since = float("inf")  # when the write that goes on was begun
        self._thread: threading.Thread | None = None
        self._is_fork = False

    def _forked(self) -> None:
        """A thread does not live on in a fork, and what is queued is the parent's to write."""
        self._begin()
        self._is_fork = True

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shmserve-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had; perhaps with the next line
            self._thread = None

    def _run(self) -> None:
        following: tuple[bytes, int] | None = None
        while True:
            if following is None:
                following = self._queue.get()
                if not self._is_fork:
                    time.sleep(_GATHER_S)
            (data, lines), following = following, None
            texts, size = [data], len(data)
            while following is None and not self._queue.empty():
                data, count = self._queue.get()
                if size + len(data) > _AT_ONCE:
                    following = data, count
                else:
                    texts.append(data)
                    size += len(data)
                    lines += count
            written = self._write_all(b"".join(texts))
            with self._lock:
                self._queued -= size
                if not written:
                    self._dropped.add(lines)

    def _write_all(self, data: bytes) -> bool:
        """Return whether the descriptor has taken it, however long that took."""
        left = memoryview(data)
        try:
            while left:
                self._since = time.monotonic()
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:  # somebody else has made it non-blocking
                    select.select([], [self._fd], [])
        except (OSError, ValueError):
            return False
        finally:
            self._since = float("inf")
        return True
