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
        relays: lines go to the relay, not to the writers.
        streams: replacements of `sys.stdout` and `sys.stderr`, by descriptor.
        writers: log writers, by descriptor.
    """

    def __init__(self) -> None:
        self.relay: LogRelay | None = None
        self.relays = False
        self.streams: dict[int, LogStream] = {}
        self.writers: dict[int, LogWriter] = {}


_output = _Output()


def begin(line: Callable[[str], str], forks: bool) -> None:
    """Take over `sys.stdout` and `sys.stderr`, or in a fork the lines of their replacements.

    Args:
        line: makes a line of the log from a text.
        forks: the process forks and so may have no thread.
    """
    if not _output.streams:
        sys.stdout, sys.stderr = _stream(sys.stdout), _stream(sys.stderr)
        atexit.register(end)
    _output.relays = forks
    if forks:
        relay = _output.relay = _output.relay or LogRelay(line)
        for fd, stream in _output.streams.items():
            stream.use(partial(relay.write, fd))
        return
    for fd, stream in _output.streams.items():
        _output.writers[fd] = _writer(fd, line)
        stream.use(_output.writers[fd].write)


def relayed_to() -> int:
    """Return the descriptor for the supervisor's `receive`, or -1 without a relay."""
    return _output.relay.receiving if _output.relay is not None else -1


def receive(fd: int) -> None:
    """Write the lines of the forking process. Called in the supervisor."""
    log_relay.receive(fd, _output.writers)


def end() -> None:
    """Wait at most a second, at the end of the process, for its lines to go out."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LogStream):
            stream.flush_begun()
    if _output.relays and _output.relay is not None:
        _output.relay.flush()
    for writer in _output.writers.values():
        writer.flush()


def _stream(below: TextIO) -> TextIO:
    if below is None:  # started without this stream
        return below
    below.flush()
    stream = _output.streams[below.fileno()] = LogStream(below)
    return stream  # type: ignore[return-value]  # it is a TextIO in all that counts


def _writer(fd: int, line: Callable[[str], str]) -> LogWriter:
    """Return the writer of a file. Streams to one file share it, so their lines keep their
    order."""
    for other, writer in _output.writers.items():
        if os.path.samestat(os.fstat(fd), os.fstat(other)):
            return writer
    return LogWriter(fd, line)
