"""Other processes as file descriptors: pidfds, exec, and locks that name their holder.

INVARIANT: nothing here waits without a deadline, and nothing waits for or signals a
process by its number alone once a pidfd is at hand: numbers are reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import BinaryIO

_log = logging.getLogger(__name__)

_MAX_FDS = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")
_BEAT = struct.Struct("Q")
_NO_BEAT = 0  # before the holder's first


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


def raise_oom_score(adj: int) -> None:
    """Have the kernel, if memory runs out, kill this process before those with less than `adj`."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < adj:
                file.seek(0)
                file.write(str(adj))
    except OSError:  # a container that shows no such thing
        return


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
    keep: Sequence[int],
    stdin: BinaryIO | None = None,
    environ: dict[str, str],
    new_session: bool,
) -> subprocess.Popen[bytes]:
    """Exec ``python -m shmserve.<role>`` in a process group of its own.

    The group keeps a Ctrl-C at the terminal away from it: who stops it does so by name.
    """
    return spawn(
        [sys.executable, "-m", f"shmserve.{role}", *arguments],
        keep=keep,
        stdin=stdin,
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


def adopt_orphans() -> None:
    """Be, instead of init, the parent of this process's descendants that lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent of now ends; forks are not concerned."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def reap_orphans(known: Set[int]) -> None:
    """Let adopted children that have ended go, but those whose pids are `known`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, options)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return  # of a known one its owner hears; then it is the next one's turn
        os.waitpid(ended.si_pid, 0)


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
    removing a locked file would let two processes hold two files of one name. Where others
    remove it nevertheless (cleaners of /tmp do), `intact` tells the holder, and who has `pin`ned it
    goes on asking about the file that it was.

    In the file is the holder's sign of life: `beat` writes it, anyone reads it with `last_beat`.

    NOTE: closing any descriptor of the file drops the lock, so the holder opens it once.

    Args:
        path: of the file.
        fd: a descriptor of it that is inherited, and this object's from now on.
    """

    def __init__(self, path: str, fd: int = -1) -> None:
        self._path = path
        self._fd = fd
        self._held = False

    def pin(self) -> int:
        """Open the file, or make it: from now on it is this one, whatever has its name."""
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        return self._fd

    def acquire(self) -> bool:
        """Take the lock if nobody holds it."""
        pinned = self._fd >= 0
        fd = self.pin()
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as ex:
            if not pinned:
                self.release()
            if ex.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        # An earlier holder's sign of life. Not cut off: its page is ours even where space runs out.
        if not self._write_beat(_NO_BEAT):
            _log.error(
                "no space for eight bytes in the run directory: without a sign of life %s may be"
                " taken for dead and replaced",
                os.path.basename(self._path).removesuffix(".lock"),
            )
        self._held = True
        return True

    def release(self) -> None:
        """Free the lock, and let go of the file."""
        self._held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._held

    def intact(self) -> bool:
        """Whether the file that is locked is still the one of this name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            return False

    def beat(self) -> bool:
        """The holder's sign of life, once a second: it also keeps the file young. Returns `intact`.

        The value is one that was never there before; nobody reads a time from it.
        """
        self._write_beat(time.monotonic_ns())
        return self.intact()

    def last_beat(self) -> int | None:
        """What the holder wrote last; None: nothing, or the file is gone."""
        with self._looked_at() as fd:
            data = os.pread(fd, _BEAT.size, 0) if fd is not None else b""
        beat = int(_BEAT.unpack(data)[0]) if len(data) == _BEAT.size else _NO_BEAT
        return beat if beat != _NO_BEAT else None

    def holder(self) -> int | None:
        """The pid of another process that holds the lock, or None."""
        if self.held:
            return None
        with self._looked_at() as fd:
            if fd is None:
                return None
            probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
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

    def _write_beat(self, beat: int) -> bool:
        try:
            os.pwrite(self._fd, _BEAT.pack(beat), 0)
        except OSError:  # no space for eight bytes: whoever watches will see no sign
            return False
        return True

    @contextlib.contextmanager
    def _looked_at(self) -> Iterator[int | None]:
        if self._fd >= 0:
            yield self._fd
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)
