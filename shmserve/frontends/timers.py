"""Timers of waits, ordered by deadline."""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from math import inf

_FEW = 1024  # smallest number of timers at which timers of ended waits are dropped


class TimedWait:
    """A wait that ends at its deadline, unless something else ends the wait before. `filed`: time
    at which the timers check the wait, perhaps before the deadline; inf if never."""

    __slots__ = ("_deadline", "_timers", "filed")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._deadline = self.filed = inf  # inf: no greenlet waits, or the wait has no deadline

    def resume(self, ready: bool) -> None:
        """End the wait, if a greenlet waits. `ready`: True unless the deadline ends the wait."""
        raise NotImplementedError

    def _file(self) -> None:
        self.filed = self._deadline
        self._timers.file(self)

    def look(self, now: float) -> None:
        """End the wait if its deadline has passed. Called at the time in `filed`."""
        self.filed = inf
        if self._deadline <= now:
            self.resume(False)
        elif self._deadline < inf:
            self._file()

    def release_timer(self) -> bool:
        """Give up the timer unless the wait has a deadline. Return True if the timer was given up,
        else False."""
        if self._deadline < inf:
            return False
        self.filed = inf
        return True


class Timers:
    """Timers of one loop. A wait that ends leaves its timer behind for its next wait. `heap`: time,
    order and wait of each timer."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, TimedWait]] = []
        self._limit = _FEW
        self._numbers = itertools.count()

    def file(self, wait: TimedWait) -> None:
        """Add a timer for the time in the wait's `filed`."""
        heappush(self.heap, (wait.filed, next(self._numbers), wait))
        if len(self.heap) > self._limit:
            self._drop_needless()

    def look(self, now: float) -> None:
        """Check each wait whose time has come."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            filed, _, wait = heappop(heap)
            if filed == wait.filed:  # else the wait was filed again, for an earlier time
                wait.look(now)

    def _drop_needless(self) -> None:
        """Drop timers of waits that are over, such as waits of closed connections."""
        self.heap[:] = [entry for entry in self.heap if entry[0] == entry[2].filed]
        self.heap[:] = [entry for entry in self.heap if not entry[2].release_timer()]
        heapify(self.heap)
        self._limit = max(_FEW, 2 * len(self.heap))
