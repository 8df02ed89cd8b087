"""Files of the setting `trace_file`: JSON arrays that several processes write.

Between writes each file is a complete array: new entries overwrite the array's end, under a lock
of the file. Only the operator chooses the path.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from shmserve.config import Settings
from shmserve.core.trace_grants import ALL_IN_ONE
from shmserve.errors import ConfigError

_log = logging.getLogger(__name__)

_BEGIN, _BETWEEN, _END = b"[\n", b",\n", b"\n]\n"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o600
_LOCK_S, _LOCK_TICK_S = 2.0, 0.01
_TELL_S = 60.0  # pause before the log repeats a problem
MAX_FILE_BYTES = 256 << 20  # further entries are lost
MAX_FILES = 1000  # entries for further files are lost


def begin(settings: Settings) -> None:
    """Empty the trace file and remove the numbered files of an earlier service, as Triton does.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = settings.trace_file
    if not path:
        return
    folder, name = os.path.split(os.path.abspath(path))
    try:
        os.close(os.open(path, _FLAGS | os.O_TRUNC, _MODE))
        for other in os.listdir(folder):
            beginning, _, number = other.rpartition(".")
            if beginning == name and number.isdecimal() and number.isascii():
                os.unlink(os.path.join(folder, other))
    except OSError as ex:
        raise ConfigError(f"trace_file: cannot be written: {ex.strerror}") from None


class TraceWriter:
    """Writer of trace files, for one thread of a process.

    Args:
        settings: gives `trace_file`.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.trace_file
        self._logged: deque[tuple[str, float]] = deque(maxlen=4)

    def append(self, number: int, entries: list[bytes]) -> None:
        """Add entries to a file, given by number or as `ALL_IN_ONE`. Failures are logged."""
        path = self._path if number == ALL_IN_ONE else f"{self._path}.{number}"
        try:
            if number >= MAX_FILES:
                self._log_loss(f"there are {MAX_FILES} files already")
                return
            with _locked(path) as fd:
                if fd is None:
                    self._log_loss("another process has locked the file")
                elif not _add(fd, _BETWEEN.join(entries), MAX_FILE_BYTES):
                    self._log_loss(
                        f"the file is full ({MAX_FILE_BYTES >> 20} MiB), or belongs to another user"
                    )
        except OSError as ex:
            self._log_loss(ex.strerror or "it cannot be written")

    def _log_loss(self, loss: str) -> None:
        now = time.monotonic()
        if not any(problem == loss and now < until for problem, until in self._logged):
            self._logged.append((loss, now + _TELL_S))
            _log.warning("traces for trace_file are lost: %s", loss)


@contextmanager
def _locked(path: str) -> Iterator[int | None]:
    """Open and lock the file. Yield None if other processes keep the lock."""
    fd = os.open(path, _FLAGS, _MODE)
    try:
        yield fd if _lock(fd) else None
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_TICK_S)
        else:
            return True


def _add(fd: int, data: bytes, limit: int) -> bool:
    """Write entries over the end of the array.

    Return False if the file would be larger than `limit`, or does not hold an array.
    """
    size = os.fstat(fd).st_size
    end = size - len(_END)
    if size and (end < len(_BEGIN) or os.pread(fd, len(_END), end) != _END):
        return False
    at = end if size else 0
    data = (_BETWEEN if size else _BEGIN) + data + _END
    if at + len(data) > limit:
        return False
    try:
        _write(fd, data, at)
    except OSError:  # no space: restore the former content
        os.ftruncate(fd, size)
        if size:
            _write(fd, _END, at)
        raise
    return True


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
