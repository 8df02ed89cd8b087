"""Log writer: writes log lines without blocking the process.

A pipe, terminal, socket or file below a log may stop taking lines at any moment. A check
beforehand does not help, because processes share such a file: two of them see the same room.
O_NONBLOCK would change the file for all its other users, and a file of another user cannot be
opened anew. So a thread writes, and only this thread waits. stdout and stderr stay unchanged. The
queue of a process holds 1 MiB of lines. At its end a process waits up to a second for its lines to
go out.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_QUEUE_BYTES = 1 << 20
# bytes that a pipe takes as a whole, not mixed with lines of other processes
_AT_ONCE = select.PIPE_BUF
_GATHER_S = 0.005  # gathers lines that go out together: waking the thread costs more than a line
_END_S = 1.0  # wait for lines to go out at the end of a process
_LOOK_S = 0.002  # pause between two checks of the queue at the end


def lines_of(text: str) -> int:
    """Return the number of lines of a text, at least 1."""
    return max(1, text.count("\n"))


class Dropped:
    """Count of lines that could not go out. `line` makes a line of the log from a text."""

    def __init__(self, line: Callable[[str], str]) -> None:
        self._count = 0
        self._line = line

    def before(self, text: str, limit: int | None = None) -> bytes:
        """Return `text`, preceded by a line with the count, if any.

        With `limit`, `text` loses its beginning so that both have at most `limit` bytes: the end
        of a traceback names the error.
        """
        notice = b""
        if self._count:
            notice = self._line(f"({self._count} lines of the log were dropped)").encode() + b"\n"
        data = text.encode(errors="replace")
        if limit is not None:
            data = data[max(0, len(notice) + len(data) - limit) :]
        return notice + data

    def add(self, lines: int) -> None:
        """Count dropped lines."""
        self._count += lines

    def take(self) -> int:
        """Forget the count, which goes out. Return it."""
        count, self._count = self._count, 0
        return count


class LogWriter:
    """Writer of lines to a descriptor, in a separate thread, from a bounded queue.

    Lines are dropped while the queue is full, and when the descriptor fails (the reader has ended,
    a disk is full). The next line that goes out gives the number of dropped lines. Any thread and
    any signal handler may write: the lock is reentrant, and no thread waits while holding it.
    """

    def __init__(self, fd: int, line: Callable[[str], str]) -> None:
        self._fd = fd
        self._dropped = Dropped(line)
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def write(self, text: str) -> None:
        """Queue a text of one or more whole lines, or drop the text."""
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
        if self._is_fork:  # a model's fork may call `os._exit` right after this line
            self.flush()

    def flush(self) -> None:
        """Wait until everything is written, at most a second. For a process's end.

        A descriptor that has taken nothing for a second is not waited for.
        """
        until = time.monotonic() + _END_S
        while self._queued and time.monotonic() < min(until, self._since + _END_S):
            time.sleep(_LOOK_S)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._queue: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
        self._queued = 0  # bytes
        self._since = float("inf")  # start of the present write; infinite without a write
        self._thread: threading.Thread | None = None
        self._is_fork = False

    def _forked(self) -> None:
        """Begin anew in a fork, which has no thread. The parent writes the queued lines."""
        self._begin()
        self._is_fork = True

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shmserve-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is available now; the next line tries again
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
        """Return True once the descriptor has taken all data, or False if the descriptor fails."""
        remaining = memoryview(data)
        try:
            while remaining:
                self._since = time.monotonic()
                try:
                    remaining = remaining[os.write(self._fd, remaining) :]
                except BlockingIOError:  # another program has made the file non-blocking
                    select.select([], [self._fd], [])
        except (OSError, ValueError):
            return False
        finally:
            self._since = float("inf")
        return True
