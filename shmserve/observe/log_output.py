"""Output of this process: written by threads, or by the supervisor for a process that forks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

from shmserve.observe import log_relay
from shmserve.observe.log_relay import LogRelay
from shmserve.observe.log_stream import LogStream
from shmserve.observe.log_writer import LogWriter


class _Output:
    """State of one process, inherited by forks until each fork calls `begin`.

    Attributes:
        relay: socket of a process that forks. Forks keep the socket for supervisors started later.
        writers: log writers, by descriptor.
    """

    def __init__(self) -> None:
        self.relay: LogRelay | None = None
        self.writers: dict[int, LogWriter] = {}
        self._relays = False  # lines go to the relay, else to the writers
        self._streams: dict[int, LogStream] = {}  # in place of stdout and stderr, by descriptor

    def begin(self, line: Callable[[str], str], forks: bool) -> None:
        """Take over `sys.stdout` and `sys.stderr`, or in a fork the lines of their replacements.

        Args:
            line: makes a line of the log from a text.
            forks: the process forks and so may have no thread.
        """
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


def receive(fd: int) -> None:
    """Write the lines of the forking process. Called in the supervisor."""
    log_relay.receive(fd, _output.writers)
