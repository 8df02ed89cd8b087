"""How another thread makes a waiting call give up at once."""

from __future__ import annotations

import os
import select
import threading

from shmserve.dispatch.executor_pool import Lane
from shmserve.errors import Cancelled


class Cancellation:
    """An eventfd that is waited for together with a lane. `cancel` is for any thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # so that nobody writes to an fd that was closed
        self._requested = False

    def cancel(self) -> None:
        """Wake whoever waits. Idempotent, and harmless when everything is over."""
        with self._lock:
            self._requested = True
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def check(self) -> None:
        """Raises Cancelled: somebody has called `cancel`."""
        if self._requested:
            raise Cancelled("the request was cancelled")

    def wait(self, lane: Lane, timeout_s: float) -> None:
        """Until the lane has something to read, but not longer than the timeout.

        Raises:
            Cancelled: see `check`.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(lane.channel.fileno(), select.POLLIN)
        poll.poll(timeout_s * 1000)
        self.check()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
