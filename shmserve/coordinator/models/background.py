"""Background thread: runs jobs that may wait for a disk, outside the coordinator's only thread.

One thread runs one job at a time. The result of a job is handed to the coordinator's loop, which
is woken. Jobs have no access to the coordinator's state.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_MAX_JOBS = 4096

Done = Callable[[Any], None]


class Background:
    """Thread and queue of jobs. `wake` is called from the thread after each job."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.Queue[tuple[Callable[[], Any], Done]] = queue.Queue(_MAX_JOBS)
        self._done: queue.SimpleQueue[tuple[Done, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Any], done: Done) -> bool:
        """Run `work` in the thread, then call `done` with the result, or with the exception, in
        `settle`. Return False if too many jobs wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((work, done))
        except queue.Full:
            return False
        return True

    def settle(self) -> None:
        """Hand over finished results. Call on the coordinator's thread."""
        while not self._done.empty():
            done, result = self._done.get()
            done(result)

    def _run(self) -> None:
        while True:
            work, done = self._jobs.get()
            try:
                result = work()
            except Exception as ex:
                _log.exception("background job failed")
                result = ex
            self._done.put((done, result))
            self._wake()
