"""Other processes as file descriptors: pidfds, exec, and locks that name their holder.

INVARIANT: nothing here waits without a deadline. With a pidfd at hand, nothing waits for or
signals a process by pid: the kernel reuses pids.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import BinaryIO, NamedTuple

_log = logging.getLogger(__name__)

_SMALLEST_FILE_BYTES = 1 << 20
_SHM = "/dev/shm"
_FEWEST_FDS = 64  # of a service with a few models and connections
_MAX_FDS = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")
_BEAT = struct.Struct("Q")
_NO_BEAT = 0  # in the file before the holder's first beat


def pidfd_open(pid: int) -> int | None:
    """Return a descriptor of the process, readable after its end; None if no process has the
    pid."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


class Stat(NamedTuple):
    """State of a process, such as ``T`` (stopped by a signal), and the pid of its parent."""

    state: str
    parent: int


def stat_of(pid: int) -> Stat | None:
    """Return state and parent of a process; None if no process has the pid."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state, parent, *_ = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return Stat(state, int(parent))


def undo_parents_state() -> None:
    """Undo what a careless parent leaves to its children.

    - Blocked signals: the service would not hear SIGTERM.
    - Missing standard streams, replaced by /dev/null: otherwise a file or socket of the service
      would get the number of a stream, to which models and libraries write.
    - A umask by which the service could not read its own files.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(os.umask(0o077) & 0o077)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def raise_fd_limit() -> str:
    """Raise the limit of descriptors to the hard limit, at most to 65536. Return why the hard limit
    is too low for the service, or ""."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, _MAX_FDS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit >= _FEWEST_FDS:
        return ""
    return (
        f"the limit of open files is {limit} (LimitNOFILE, ulimit -n), and the service needs"
        f" {_FEWEST_FDS} at least"
    )


def raise_file_limit() -> str:
    """Raise the limit on the size of files to the hard limit. Return why the hard limit is too low
    for shared memory, or ""."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= _SMALLEST_FILE_BYTES:
        return ""
    return (
        f"the limit on the size of files is {hard} bytes (LimitFSIZE, ulimit -f), and shared"
        f" memory needs {_SMALLEST_FILE_BYTES} at least"
    )


def missing_memory() -> str:
    """Return why this process can make no shared memory, or ""."""
    if os.access(_SHM, os.W_OK | os.X_OK):
        return ""
    return f"{_SHM} is missing, or cannot be written: mount a tmpfs there, for tensors"


def raise_oom_score(adj: int) -> None:
    """Have the kernel, if memory runs out, kill this process before processes with less than
    `adj`."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < adj:
                file.seek(0)
                file.write(str(adj))
    except OSError:  # hidden in this container
        return


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Return whether the process has ended; wait for its end at most `timeout_s`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal the process; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def follow(pidfd: int, stop: Callable[[], None], within_s: float = 4.0) -> None:
    """Once the process has ended, call `stop`, and end this process after `within_s` anyway.

    A daemon thread does this, for roles without a loop that could watch the pidfd.
    """

    def watch() -> None:
        while not has_ended(pidfd, 3600.0):
            continue
        stop()
        time.sleep(within_s)
        os._exit(1)

    threading.Thread(target=watch, name="shmserve-follow", daemon=True).start()


def spawn(
    command: Sequence[str],
    *,
    keep: Sequence[int] = (),
    stdin: BinaryIO | None = None,
    environ: dict[str, str] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Exec a command with only the standard streams and the descriptors in `keep`, in a process
    group of its own: a Ctrl-C at the terminal is for the master, which stops the process."""
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
    """Make this process, instead of init, the new parent of descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its present parent ends. Forks do not inherit
    this."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def reap_orphans(known: Set[int]) -> None:
    """Reap adopted children that have ended, except children with pids in `known`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, options)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return  # the owner reaps a known child first; then the next call goes on
        os.waitpid(ended.si_pid, 0)


def describe_status(status: int | None) -> str:
    """Return an exit status as text for operators: ``signal SIGKILL``, ``status 1``."""
    if status is None:
        return "status unknown (not a child)"
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"status {status}"


class FileLock:
    """Exclusive lock on a file, held by one process until its end or `release`.

    The lock is a POSIX record lock: a fork does not inherit it, the kernel drops it at any end of
    the process, and every process may ask for the holder. The file stays: if a locked file were
    removed, two processes could hold two files of one name. Other programs (cleaners of /tmp) may
    remove the file nevertheless. `intact` tells the holder. A process with a `pin`ned file goes on
    asking about the old file.

    The file contains the holder's sign of life: `beat` writes the sign, and every process can read
    it with `last_beat`.

    NOTE: closing any descriptor of the file drops the lock, so the holder opens the file once.

    `path`: path of the lock file. `fd`: an inherited descriptor of the file, owned by this object
    from now on.
    """

    def __init__(self, path: str, fd: int = -1) -> None:
        self._path = path
        self._fd = fd
        self.held = False

    def pin(self) -> int:
        """Open or make the file, and return its descriptor. The lock stays with this file,
        whichever file has the name later."""
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        return self._fd

    def acquire(self) -> bool:
        """Take the lock. Return False if another process holds it."""
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
        # Overwrite an earlier holder's beat. The file is not truncated: it keeps its page when
        # space runs out.
        if not self._write_beat(_NO_BEAT):
            _log.error(
                "no space for eight bytes in the run directory: without a sign of life %s may be"
                " taken for dead and replaced",
                os.path.basename(self._path).removesuffix(".lock"),
            )
        self.held = True
        return True

    def release(self) -> None:
        """Free the lock, and close the file."""
        self.held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def intact(self) -> bool:
        """Return whether the path still names the locked file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            return False

    def beat(self) -> bool:
        """Write the holder's sign of life, once a second, which also keeps the file young. Return
        `intact`.

        The value was never in the file before. Readers look for a change, not for a time.
        """
        self._write_beat(time.monotonic_ns())
        return self.intact()

    def last_beat(self) -> int | None:
        """Return the value of the holder's last beat; None without a beat or a file."""
        with self._looked_at() as fd:
            data = os.pread(fd, _BEAT.size, 0) if fd is not None else b""
        beat = int(_BEAT.unpack(data)[0]) if len(data) == _BEAT.size else _NO_BEAT
        return beat if beat != _NO_BEAT else None

    def holder(self) -> int | None:
        """Return the pid of another process that holds the lock, or None."""
        if self.held:
            return None
        with self._looked_at() as fd:
            if fd is None:
                return None
            probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
        return pid if kind != fcntl.F_UNLCK else None

    def holder_pidfd(self) -> tuple[int, int] | None:
        """Return (pid, pidfd) of the holder, certainly of the same process, or None."""
        pid = self.holder()
        pidfd = pidfd_open(pid) if pid else None
        if pid is None or pidfd is None:
            return None
        # the holder ended in between, and another process may have the pid
        if self.holder() != pid:
            os.close(pidfd)
            return None
        return pid, pidfd

    def _write_beat(self, beat: int) -> bool:
        try:
            os.pwrite(self._fd, _BEAT.pack(beat), 0)
        except OSError:  # no space for eight bytes: watchers will see no beat
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
