"""Files that are read again when they have changed."""

import os
import threading
import time

_LOOK_S = 1.0

Signature = tuple[int, ...]


class FileChanges:
    """Detector of changes to files since the last look. Thread-safe."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._seen = self._look()
        self._due = time.monotonic() + _LOOK_S

    @property
    def due(self) -> bool:
        """Return whether `found` would look at the files now."""
        return time.monotonic() >= self._due

    def found(self) -> bool:
        """Return whether a file has changed and no caller was told yet. Looks once a second at
        most."""
        if not self.due or not self._lock.acquire(blocking=False):
            return False
        try:
            self._due = time.monotonic() + _LOOK_S
            before, self._seen = self._seen, self._look()
            return self._seen != before
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Note that the files could not be used as they were: the next look finds a change."""
        with self._lock:
            self._seen = []

    def _look(self) -> list[Signature]:
        return [_signature(path) for path in self._paths]


def _signature(path: str) -> Signature:
    """Return values of which at least one differs after any change of the file."""
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
