"""Ensemble runs: runs the steps of one request side by side, as far as threads are available.

A thread that has finished a run takes the next run, and has other threads take further runnable
runs. The request's thread (or greenlet) waits for answers. It runs steps itself if nothing else is
running or no thread is free, so an ensemble works without further threads.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct, field

from shmserve import waiting
from shmserve.core.scheduling.ensemble_progress import GraphProgress, Run
from shmserve.errors import DeadlineExceeded


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


_TICK_S = 1.0  # period of checks by a waiting thread, in case no event comes


class StepRuns(Struct, eq=False):
    """Runs of one request. All methods but `fail` are for the request's thread only.

    Args:
        perform: makes a run, or a streaming run up to its next answer; returns True if the run
            goes on. May wait. May be called by several threads, but only once at a time for each
            run.
        cancel: makes current runs give up.

    Attributes:
        lock: guards `progress` and the state shared by `perform`. Never held while waiting.
        failed: true once no further run may begin.
    """

    progress: GraphProgress
    _threads: StepThreads
    _perform: Callable[[Run], bool]
    _cancel: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: bool = False
    _error: BaseException | None = None
    _helpers: int = 0
    # set on each change, to wake the waiting thread
    _changed: waiting.WaitEvent | None = None

    def next_answer(self, whole: bool, due: float, overdue: str) -> int | None:
        """Return the number of the next answer once complete. Return None after the last answer.

        Args:
            whole: true to wait for the end of all runs before returning the only answer.
            due: end of the wait (`time.monotonic`).
            overdue: error text for a missed deadline.

        Raises:
            DeadlineExceeded: `due` has passed.
            BaseException: the error of a run, or the argument of `fail`.
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
            remaining_s = due - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(overdue)
            if not runnable or not (alone or not self._hire()):
                changed.wait(min(remaining_s, _TICK_S))
            else:
                self._run_one()

    def fail(self, error: BaseException) -> None:
        """End the request with this error, unless another error came first. For any thread."""
        with self.lock:
            if not self.failed:
                self._error = error
            self.failed = True
        self._cancel()
        self._tell()

    def stop(self) -> None:
        """Wait until no other thread works on the request. Idempotent. Call after `fail` or after
        the last run."""
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
                del error  # The traceback refers to this frame: break the reference cycle.

    def _hire(self) -> bool:
        """Have another thread take runs. Return False if no thread is free."""
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
        """Take a run and make it. Return False if no run could be taken, or the run failed."""
        with self.lock:
            run = None if self.failed else self.progress.take()
            if run is None:
                return False
            more = self.progress.runnable
        if more and not self._hire():
            self._tell()  # the waiting thread may take a run
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
