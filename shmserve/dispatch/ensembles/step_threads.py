"""Steps of ensembles that can run beside others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from shmserve import waiting


class StepThreads:
    """At most `limit` at a time in this process."""

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)

    def start(self, work: Callable[[], None]) -> waiting.Task | None:
        """What does the work; None: there is none to be had now. It never waits."""
        if not self._free.acquire(blocking=False):
            return None
        try:
            return waiting.start(partial(self._run, work), "step")
        except RuntimeError:  # the system has none
            self._free.release()
            return None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._free.release()
