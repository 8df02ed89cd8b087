"""Closing descriptors that strangers have passed.

`close` of a file may wait for whoever serves its file system, and with FUSE that can be
the stranger. So what is not known to be memory is closed by a thread of its own, and while
that one is stuck no more descriptors are taken.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable

# What a burst leaves behind while the thread waits for its turn is far from it, and so is the
# process's limit from this.
_MANY = 256


class DeferredClose:
    """Closes elsewhere. The thread begins with the first descriptor."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Whether too many descriptors wait to be closed."""
        return self._queue.qsize() >= _MANY

    def close(self, fds: Iterable[int]) -> None:
        """Have these closed, some time."""
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
                continue  # closed all the same, as Linux has it
