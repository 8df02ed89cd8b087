"""Flight recorder: the latest events of a service, in files that survive every process.

Each process writes a ring (`core.stats.event_ring`) in the folder `events` of the run directory,
from its first event on. A process without events has no ring. A lock on the file shows that the
writer lives. The latest rings of ended processes are kept. `shmserve show events` reads all rings,
even if no process lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import msgspec

from shmserve.config import GENERATION
from shmserve.core.stats import event_ring
from shmserve.core.stats.event_ring import EventRing, RecordedEvent
from shmserve.log_fields import iso_time, with_fields

_log = logging.getLogger(__name__)

_RECORDS = 1000  # records of a ring; also limit of rows to show or keep
KEPT_RINGS = 24  # rings of ended processes to keep
BAD_END = "bad-end.json"  # rows at the moment of a failure or a forced end, as `keep` writes them
_FOLDER = "events"
_RING = ".ring"
_MAX_BYTES = 64 << 20  # limit of a ring to read
_AGAIN_S = 1.0  # making a ring reads all rings and asks the file system
_SPARE_INODES = 8  # left for the sockets of restarted executors


class _Recorder:
    """The ring of this process."""

    def __init__(self, run_dir: str, process: str, records: int = _RECORDS) -> None:
        self._folder = _folder(run_dir)
        self._process = process
        self._ring = EventRing(records)
        self._fd = -1
        self._again_at = 0.0  # no new attempt to make the ring before this time
        self._broken = ""  # reason why the last event could not be written
        self._lock = threading.Lock()

    def add(self, kind: str, subject: str, text: str) -> None:
        with self._lock:
            try:
                if self._fd < 0:
                    if time.monotonic() < self._again_at:
                        return
                    self._again_at = time.monotonic() + _AGAIN_S
                    self._fd = _create(self._folder, self._process)
                offset, record = self._ring.add(time.time(), kind, subject, text)
                os.pwrite(self._fd, record, offset)
                self._broken = ""
            except OSError as ex:  # the service goes on even if its history cannot be written
                if self._broken != str(ex.strerror):
                    self._broken = str(ex.strerror)
                    _log.error("events are not recorded for now: %s", ex.strerror)


_NO_FIELDS: Mapping[str, object] = {}
_recorder: _Recorder | None = None
_follow: Callable[[RecordedEvent], None] | None = None


def start(run_dir: str, process: str) -> None:
    """Record the events of this process from now on."""
    global _recorder
    _recorder = _Recorder(run_dir, process)


def follow(take: Callable[[RecordedEvent], None]) -> None:
    """From now on, also pass each event of this process to `take`, without joining repeated
    events."""
    global _follow
    _follow = take


def record(
    kind: str, subject: str, text: str = "", fields: Mapping[str, object] = _NO_FIELDS
) -> None:
    """Record an event. Never fails, and records nothing before `start`."""
    if _recorder is not None:
        _recorder.add(kind, subject, with_fields(text, fields) if fields else text)
    if _follow is not None:
        now = time.time()
        _follow(RecordedEvent(0, now, now, kind, subject, text, fields=fields))


def rows(run_dir: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the last events of all processes that have a ring, the newest last."""
    count = _RECORDS if limit is None else min(limit, _RECORDS)
    folder = _folder(run_dir)
    merged = [(event, name) for name in _rings(folder) for event in _read(folder, name)]
    merged.sort(key=lambda pair: (pair[0].last, pair[0].number))
    return [
        _row(event, name.removesuffix(_RING))
        for event, name in merged[max(0, len(merged) - count) :]
    ]


def keep(run_dir: str) -> None:
    """Write the result of `rows` to a file after a bad end, so that later events cannot replace
    it."""
    path = os.path.join(_folder(run_dir), BAD_END)
    try:
        with open(path + ".new", "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(rows(run_dir))))
        os.replace(path + ".new", path)
    except OSError as ex:
        _log.error("the last events were not written to a file: %s", ex.strerror)


def _folder(run_dir: str) -> str:
    """Return the folder of the rings, shared by all generations of a service."""
    above, name = os.path.split(run_dir)
    return os.path.join(above if GENERATION.fullmatch(name) else run_dir, _FOLDER)


def _row(event: RecordedEvent, process: str) -> dict[str, Any]:
    return {
        "time": iso_time(event.last),
        "since": iso_time(event.first) if event.count > 1 else "",
        "count": event.count,
        "process": process,
        "event": event.kind,
        "subject": event.subject,
        "text": event.text,
    }


def _create(folder: str, process: str) -> int:
    """Create a ring and lock it for as long as this process lives."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    _sweep(folder)
    space = os.statvfs(folder)
    if space.f_files and space.f_ffree < _SPARE_INODES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, process + _RING), flags, 0o600)
    # a file system without locks, or another process is just testing the lock
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _sweep(folder: str) -> None:
    """Remove the older rings of ended processes."""
    dead = [name for name in _rings(folder) if not _is_written(os.path.join(folder, name))]
    if len(dead) <= KEPT_RINGS:
        return
    # An empty ring counts as the newest: its writer has just made it and is about to lock it.
    last = {name: max((e.last for e in _read(folder, name)), default=inf) for name in dead}
    for name in sorted(dead, key=last.__getitem__)[:-KEPT_RINGS]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _is_written(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _rings(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(_RING)]
    except FileNotFoundError:
        return []


def _read(folder: str, name: str) -> list[RecordedEvent]:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return event_ring.decode(file.read(_MAX_BYTES))
    except OSError:  # another process has just swept the ring
        return []
