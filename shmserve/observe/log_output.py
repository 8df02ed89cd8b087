"""Output of this process: written by threads, or by the supervisor for a process that forks."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

from shmserve.observe.log_stream import LogStream
from shmserve.observe.log_writer import Dropped, LogWriter, lines_of

_LONGEST = 65536  # bytes of a message: a descriptor's number, then text
_END_S = 1.0  # for the master's last lines to go out
_PAUSE_S = 1.0  # after a failed receive
_STDERR = 2  # takes messages for a descriptor that this process does not write to
_AGAIN_S = 0.05  # repeats the alarm, in case the first came before the write began


class LogRelay:
    """Log lines of a process that forks and so may have no thread: gunicorn's master.

    The master sends lines through a socket that never blocks and has no other users. Forks of the
    master do the same until they have a thread. The supervisor writes the lines. Before the first
    supervisor, and between two supervisors, lines wait in the socket's buffer; lines that find no
    room are dropped and counted. Lines still in the socket when the master ends are written by the
    master itself: a start that fails has no supervisor. Only the master's own end then waits for
    this write, and an alarm bounds the wait.

    `line`: makes a line of the log from a text. `receiving`: descriptor for the supervisor.
    """

    def __init__(self, line: Callable[[str], str]) -> None:
        self._sending, self._receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.receiving = self._receiving.fileno()
        self._dropped = Dropped(line)

    def write(self, fd: int, text: str) -> None:
        """Send a text to be written to `fd`, or drop the text."""
        data = self._dropped.before(text, _LONGEST - 1)
        try:
            self._sending.send(bytes((fd,)) + data, socket.MSG_DONTWAIT)
        except OSError:
            self._dropped.add(lines_of(text))
        else:
            self._dropped.take()

    def flush(self) -> None:
        """Write the lines that no supervisor has received. For the end of the master."""
        signal.signal(signal.SIGALRM, _give_up)
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_REAL, _END_S, _AGAIN_S)
            while data := self._receiving.recv(_LONGEST, socket.MSG_DONTWAIT):
                remaining = memoryview(data)[1:]
                while remaining:
                    remaining = remaining[os.write(data[0], remaining) :]
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _give_up(*_: object) -> None:
    raise TimeoutError


class _Output:
    """State of one process, inherited by forks until each fork calls `begin`. `relay`: socket of a
    process that forks. Forks keep the socket for supervisors started later. `writers`: log writers,
    by descriptor."""

    def __init__(self) -> None:
        self.relay: LogRelay | None = None
        self.writers: dict[int, LogWriter] = {}
        self._last_lines: Callable[[], None] = lambda: None
        self._relays = False  # lines go to the relay, else to the writers
        self._streams: dict[int, LogStream] = {}  # in place of stdout and stderr, by descriptor

    def begin(
        self, line: Callable[[str], str], forks: bool, last_lines: Callable[[], None]
    ) -> None:
        """Take over `sys.stdout` and `sys.stderr`, or in a fork the lines of their replacements.
        `line`: makes a line of the log from a text. `forks`: the process forks and so may have no
        thread. `last_lines`: writes counts of lines left out, at the end of the process."""
        self._last_lines = last_lines
        if not self._streams:
            sys.stdout, sys.stderr = self._stream(sys.stdout), self._stream(sys.stderr)
            atexit.register(self.end)
        self._relays = forks
        if forks:
            relay = self.relay = self.relay or LogRelay(line)
            for fd, stream in self._streams.items():
                stream.use(partial(relay.write, fd))
            return
        for fd, stream in self._streams.items():
            self.writers[fd] = self._writer(fd, line)
            stream.use(self.writers[fd].write)

    def end(self) -> None:
        """Wait at most a second, at the end of the process, for the lines to go out."""
        self._last_lines()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LogStream):
                stream.flush_begun()
        if self._relays and self.relay is not None:
            self.relay.flush()
        for writer in self.writers.values():
            writer.flush()

    def _stream(self, below: TextIO) -> TextIO:
        if below is None:  # the process was started without
            return below
        below.flush()
        stream = self._streams[below.fileno()] = LogStream(below)
        return stream  # type: ignore[return-value]  # it is a TextIO in all that counts

    def _writer(self, fd: int, line: Callable[[str], str]) -> LogWriter:
        """Return a file's writer. Streams to one file share it, so lines keep their order."""
        for other, writer in self.writers.items():
            if os.path.samestat(os.fstat(fd), os.fstat(other)):
                return writer
        return LogWriter(fd, line)


_output = _Output()
begin, end = _output.begin, _output.end


def relayed_to() -> int:
    """Return the descriptor for the supervisor's `receive`, or -1 without a relay."""
    return _output.relay.receiving if _output.relay is not None else -1


def receive(receiving: int) -> None:
    """Write, in a thread of the supervisor, the lines that come through the relay's socket."""
    writers = _output.writers
    sock = socket.socket(fileno=receiving)

    def run() -> None:
        while True:
            try:
                data = sock.recv(_LONGEST)
            except OSError:  # only this message is lost: go on with later lines
                time.sleep(_PAUSE_S)
                continue
            if not data:
                sock.close()
                return
            writer = writers.get(data[0], writers.get(_STDERR))
            if writer is not None:
                writer.write(data[1:].decode(errors="replace"))

    threading.Thread(target=run, name="shmserve-log-relay", daemon=True).start()
