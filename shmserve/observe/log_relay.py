"""Log lines of a process that forks, and so may have no thread: gunicorn's master.

The master, and what it forks until that has a thread, sends lines through a socket that is ours
alone and never blocks; the supervisor writes them. Before the first supervisor, and between two of
them, lines wait in the socket's buffer; those that find no room there are dropped and counted. What
is still in the socket when the master ends (a start that fails has no supervisor) the master writes
itself: nothing waits for it any more but its own end, which an alarm bounds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from shmserve.observe.log_writer import Dropped, LogWriter, lines_of

_LONGEST = 65536  # bytes of a message: a descriptor's number, then text
_END_S = 1.0  # for the master's last lines to go out
_PAUSE_S = 1.0  # after a failed receive
_STDERR = 2  # takes what comes for a descriptor that this process does not write to
_AGAIN_S = 0.05  # an alarm that came before the write that it is to end


class LogRelay:
    """Both ends of the socket. `line` makes a line of the log of a text.

    Attributes:
        receiving: descriptor that the supervisor is given.
    """

    def __init__(self, line: Callable[[str], str]) -> None:
        self._sending, self._receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.receiving = self._receiving.fileno()
        self._dropped = Dropped(line)

    def write(self, fd: int, text: str) -> None:
        """Have text written to `fd`, or drop it."""
        data = self._dropped.before(text, _LONGEST - 1)
        try:
            self._sending.send(bytes((fd,)) + data, socket.MSG_DONTWAIT)
        except OSError:
            self._dropped.add(lines_of(text))
        else:
            self._dropped.take()

    def flush(self) -> None:
        """Write what nobody has received. For the master's end: it forks no more, and it ends."""
        signal.signal(signal.SIGALRM, _give_up)
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_REAL, _END_S, _AGAIN_S)
            while data := self._receiving.recv(_LONGEST, socket.MSG_DONTWAIT):
                left = memoryview(data)[1:]
                while left:
                    left = left[os.write(data[0], left) :]
        with contextlib.suppress(OSError):
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _give_up(*_: object) -> None:
    raise TimeoutError


def receive(receiving: int, writers: Mapping[int, LogWriter]) -> None:
    """In the supervisor: write what comes through the relay's socket, in a thread."""
    sock = socket.socket(fileno=receiving)

    def run() -> None:
        while True:
            try:
                data = sock.recv(_LONGEST)
            except OSError:  # of this message: later lines are not to be lost, too
                time.sleep(_PAUSE_S)
                continue
            if not data:
                sock.close()
                return
            writer = writers.get(data[0], writers.get(_STDERR))
            if writer is not None:
                writer.write(data[1:].decode(errors="replace"))

    threading.Thread(target=run, name="shmserve-log-relay", daemon=True).start()
