"""Other processes as file descriptors: pidfds, exec, and locks that name their holder.

INVARIANT: nothing here waits without a deadline, and nothing waits for or signals a
process by its number alone once a pidfd is at hand: numbers are reused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

_MAX_FDS = 1 << 16
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")


def pidfd_open(pid: int) -> int | None:
    """A descriptor of the process, readable once it has ended; None: no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def raise_fd_limit() -> None:
    """Use as many descriptors as this process may have, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, _MAX_FDS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process has ended, waiting for it at most `timeout_s`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal the process; nothing happens if it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass


def follow(pidfd: int, stop: Callable[[], None], within_s: float = 4.0) -> None:
    """Once the process has ended, call `stop`, and end this process after `within_s` anyway.

    For roles without a loop of their own that could watch the pidfd: a daemon thread does.
    """

    def watch() -> None:
        while not has_ended(pidfd, 3600.0):
            continue
        stop()
        time.sleep(within_s)
        os._exit(1)

    threading.Thread(target=watch, name="shmserve-follow", daemon=True).start()


def spawn_role(
    role: str,
    arguments: Sequence[str],
    *,
    master_fd: int,
    environ: dict[str, str],
    new_session: bool,
) -> subprocess.Popen[bytes]:
    """Exec ``python -m shmserve.<role>`` in a process group of its own.

    The group keeps a Ctrl-C at the terminal away from it: who stops it does so by name.
    """
    return spawn(
        [sys.executable, "-m", f"shmserve.{role}", *arguments, "--master-fd", str(master_fd)],
        keep=(master_fd,),
        environ=environ,
        new_session=new_session,
    )


def spawn(
    command: Sequence[str],
    *,
    keep: Sequence[int] = (),
    stdin: BinaryIO | None = None,
    environ: dict[str, str] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Exec a command with only the standard streams and the descriptors in `keep`."""
    return subprocess.Popen(
        command,
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        close_fds=True,
        pass_fds=tuple(keep),
        env=environ,
        start_new_session=new_session,
        process_group=None if new_session else 0,
    )


def describe_status(status: int | None) -> str:
    """An exit status for operators: ``signal SIGKILL``, ``status 1``."""
    if status is None:
        return "status unknown (not a child)"
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"status {status}"


class FileLock:
    """An exclusive lock on a file, held by one process until it ends or releases it.

    A POSIX record lock: a fork does not inherit it, the kernel drops it with the process
    however that ends, and anyone may ask who holds it without taking it. The file stays:
    removing a locked file would let two processes hold two files of one name.

    NOTE: closing any descriptor of the file drops the lock, so the holder opens it once.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> bool:
        """Take the lock if nobody holds it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as ex:
            os.close(fd)
            if ex.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._fd >= 0

    def holder(self) -> int | None:
        """The pid of another process that holds the lock, or None."""
        if self.held:
            return None
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
        finally:
            os.close(fd)
        return pid if kind != fcntl.F_UNLCK else None

    def holder_pidfd(self) -> tuple[int, int] | None:
        """(pid, pidfd) of the holder, certain to be of the same process; None: none."""
        pid = self.holder()
        pidfd = pidfd_open(pid) if pid else None
        if pid is None or pidfd is None:
            return None
        if self.holder() != pid:  # it ended in between, the number may be another's
            os.close(pidfd)
            return None
        return pid, pidfd
