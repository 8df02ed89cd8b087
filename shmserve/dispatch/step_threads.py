"""Threads for steps of ensembles that can run beside others."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StepThreads:
    """At most `limit` at a time in this process."""

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)

    def start(self, work: Callable[[], None]) -> threading.Thread | None:
        """A thread that does the work; None: there is none to be had now. It never waits."""
        if not self._free.acquire(blocking=False):
            return None
        thread = threading.Thread(target=self._run, args=(work,), name="step", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has none
            self._free.release()
            return None
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._free.release()
