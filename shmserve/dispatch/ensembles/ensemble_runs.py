"""The threads of one request to an ensemble: its runs side by side, as far as there are threads.

Whoever has finished a run takes the next one, and has others begin beside it what can begin. The
thread of the request (or the greenlet) waits for answers; it runs steps itself where nothing else
goes on, and where there is no other thread, so that an ensemble needs none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shmserve import waiting
from shmserve.core.scheduling.ensemble_progress import GraphProgress, Run
from shmserve.dispatch.ensembles.step_threads import StepThreads
from shmserve.errors import DeadlineExceeded

_TICK_S = 1.0  # how often who waits looks again, though it is woken


class StepRuns:
    """For the thread of the request, but for `fail`.

    Args:
        perform: makes a run, or one of a stream up to its next answer; whether it goes on. It may
            wait, and be called by several threads, but only once at a time for each run.
        cancel: makes those that are being made give up.

    Attributes:
        lock: guards `progress` and what `perform` shares. Nobody waits with it held.
        failed: no run begins any more.
    """

    def __init__(
        self,
        progress: GraphProgress,
        threads: StepThreads,
        perform: Callable[[Run], bool],
        cancel: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()
        self.progress = progress
        self.failed = False
        self._threads = threads
        self._perform = perform
        self._cancel = cancel
        self._error: BaseException | None = None
        self._helpers = 0
        self._changed: waiting.WaitEvent | None = None  # who waits is told so

    def next_answer(self, whole: bool, due: float, overdue: str) -> int | None:
        """The number of the next answer, when it is there; None: there is none any more.

        Args:
            whole: wait for the end of all runs, until which there is no answer.
            due: when the wait ends (`time.monotonic`), with the text `overdue`.

        Raises:
            DeadlineExceeded: that time has come.
            BaseException: what a run has raised, or whatever `fail` was told.
        """
        progress = self.progress
        while True:
            with self.lock:
                self._raise_error()
                number = None if whole and not progress.over else progress.answer()
                if number is not None or progress.over:
                    return number
                runnable = progress.runnable
                alone = whole or (runnable == 1 and not progress.running)
                self._changed = changed = waiting.event()
            left_s = due - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(overdue)
            if not runnable or not (alone or not self._hire()):
                changed.wait(min(left_s, _TICK_S))
            else:
                self._run_one()

    def fail(self, error: BaseException) -> None:
        """It ends with this error, unless with an earlier one. From any thread."""
        with self.lock:
            if not self.failed:
                self._error = error
            self.failed = True
        self._cancel()
        self._tell()

    def stop(self) -> None:
        """Wait until no other thread works on it. Idempotent; after `fail`, or when all is over."""
        while True:
            with self.lock:
                if not self._helpers:
                    return
                self._changed = changed = waiting.event()
            changed.wait(_TICK_S)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a circle with all that the callers have

    def _hire(self) -> bool:
        """Have another thread take runs; False: there is none."""
        with self.lock:
            self._helpers += 1
        if self._threads.start(self._help) is not None:
            return True
        with self.lock:
            self._helpers -= 1
        return False

    def _help(self) -> None:
        try:
            while self._run_one():
                pass
        finally:
            with self.lock:
                self._helpers -= 1
            self._tell()

    def _run_one(self) -> bool:
        """Take a run; False: there was none to be taken."""
        with self.lock:
            run = None if self.failed else self.progress.take()
            if run is None:
                return False
            more = self.progress.runnable
        if more and not self._hire():
            self._tell()  # who waits may take it
        try:
            goes_on = self._perform(run)
        except BaseException as ex:
            self.fail(ex)
            return False
        with self.lock:
            (self.progress.paused if goes_on else self.progress.ended)(run)
        self._tell()
        return True

    def _tell(self) -> None:
        changed = self._changed
        if changed is not None:
            changed.set()
