"""Step threads: threads in which steps of ensembles run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from shmserve import waiting


class StepThreads:
    """Threads for steps, at most `limit` at a time in this process."""

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)

    def start(self, work: Callable[[], None]) -> waiting.Task | None:
        """Start `work` in a thread without waiting. Return None if no thread is free."""
        if not self._free.acquire(blocking=False):
            return None
        try:
            return waiting.start(partial(self._run, work), "step")
        except RuntimeError:  # the system has no free thread
            self._free.release()
            return None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._free.release()
