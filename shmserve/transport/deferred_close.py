"""Deferred close of descriptors that clients have passed.

`close` of a file may wait for the server of its file system. With FUSE this server can be the
client itself. So a thread of its own closes descriptors that may be anything but memory. While the
thread is stuck, no more descriptors are taken.
"""

import os
import queue
import threading
from collections.abc import Iterable

# Far more than a burst leaves waiting for the thread's turn, and far below the process's limit of
# descriptors.
_MANY = 256


class DeferredClose:
    """Closes descriptors in a thread, which begins with the first descriptor."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Return whether too many descriptors wait to be closed."""
        return self._queue.qsize() >= _MANY

    def close(self, fds: Iterable[int]) -> None:
        """Queue descriptors for the closing thread."""
        for fd in fds:
            self._queue.put(fd)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="closer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            fd = self._queue.get()
            try:
                os.close(fd)
            except OSError:
                continue  # Linux has freed the descriptor all the same
