"""Shared runs: one run of some work answers all callers that wait for the work.

Many callers at once, such as scrapes of the metrics, cost as much as two: callers that come during
a run wait for the next run, whose result is as new as if each had asked alone.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from shmserve import waiting
from shmserve.errors import ShmserveError, Unavailable
from shmserve.waiting import WaitEvent

_PATIENCE_S = 30.0  # longest wait for other callers' runs
_Result = TypeVar("_Result")


class _Waiter(Generic[_Result]):
    """A waiting caller. `leads`: True if the caller is to run the work itself. `has_left`: True if
    the caller has stopped waiting."""

    def __init__(self) -> None:
        self.event: WaitEvent = waiting.event()
        self.leads = self.has_left = False
        self.results: list[_Result] = []
        self.error: ShmserveError | None = None


class SharedRuns(Generic[_Result]):
    """Runs `work`, which has deadlines of its own, for many callers. Thread-safe."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._lock = threading.Lock()  # guards the fields below
        self._runs = False
        self._waiting: list[_Waiter[_Result]] = []

    def result(self) -> _Result:
        """Return the result of a run that begins after this call, or raise the run's error. Raise
        Unavailable if other callers' runs take too long."""
        with self._lock:
            if not self._runs:
                self._runs = True
                mine = None
            else:
                mine = _Waiter[_Result]()
                self._waiting.append(mine)
        if mine is not None:
            self._wait(mine)
            if mine.error is not None:
                raise mine.error
            if not mine.leads:
                return mine.results[0]
        return self._lead()

    def _wait(self, mine: _Waiter[_Result]) -> None:
        is_over = False
        try:
            is_over = mine.event.wait(_PATIENCE_S)
            if not is_over:
                raise Unavailable("the server is overloaded")
        finally:
            if not is_over:  # also if the caller's greenlet ends
                self._leave(mine)

    def _leave(self, mine: _Waiter[_Result]) -> None:
        with self._lock:
            mine.has_left = True
            if mine in self._waiting:
                self._waiting.remove(mine)
            leads = mine.leads
        if leads:
            self._pass_on()

    def _lead(self) -> _Result:
        with self._lock:
            followers, self._waiting = self._waiting, []
        try:
            result = self._work()
            for follower in followers:
                follower.results.append(result)
        except ShmserveError as ex:
            for follower in followers:
                follower.error = type(ex)(ex.message)
            raise
        except BaseException:  # the caller's greenlet ends, or a defect: the next one tries
            with self._lock:
                self._waiting[:0] = [each for each in followers if not each.has_left]
            followers = []
            raise
        finally:
            for follower in followers:
                follower.event.set()
            self._pass_on()
        return result

    def _pass_on(self) -> None:
        """Have a waiting caller run the work next."""
        with self._lock:
            self._runs = bool(self._waiting)
            if not self._waiting:
                return
            leader = self._waiting.pop(0)
            leader.leads = True
        leader.event.set()
