"""Files that are read again when they have changed."""

from __future__ import annotations

import os
import threading
import time

_LOOK_S = 1.0

Signature = tuple[int, ...]


class FileChanges:
    """Tells of changes to some files since they were first looked at. Thread-safe."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._seen = self._look()
        self._due = time.monotonic() + _LOOK_S

    @property
    def due(self) -> bool:
        """Whether `found` would look now."""
        return time.monotonic() >= self._due

    def found(self) -> bool:
        """Whether there was one that nobody was told of; looks once a second at most."""
        if not self.due or not self._lock.acquire(blocking=False):
            return False
        try:
            self._due = time.monotonic() + _LOOK_S
            before, self._seen = self._seen, self._look()
            return self._seen != before
        finally:
            self._lock.release()

    def forget(self) -> None:
        """The files could not be used as they were: the next look finds a change."""
        with self._lock:
            self._seen = []

    def _look(self) -> list[Signature]:
        return [_signature(path) for path in self._paths]


def _signature(path: str) -> Signature:
    """What differs after any change."""
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
