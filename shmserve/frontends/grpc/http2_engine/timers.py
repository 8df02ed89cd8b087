"""The calls' deadlines, most of which are over before they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

_SLACK = 64


class Expiring(Protocol):
    """A call with a deadline."""

    def is_active(self) -> bool: ...

    def expire(self) -> None:
        """Its deadline has passed."""
        ...


class Deadlines:
    """A heap that is cleared of ended calls once they are more than half of it.

    Attributes:
        next_due: when `passed` has something to do, at the latest; infinite: never.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expiring]] = []
        self._order = count()
        self._ended = 0
        self.next_due = float("inf")

    def add(self, when: float, call: Expiring) -> None:
        heappush(self._heap, (when, next(self._order), call))
        self.next_due = self._heap[0][0]

    def ended(self) -> None:
        """One of the calls has ended."""
        self._ended += 1
        if self._ended > _SLACK and 2 * self._ended > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].is_active()]
            heapify(self._heap)
            self._ended = 0
            self._look()

    def passed(self, now: float) -> Iterator[Callable[[], None]]:
        """What is to be called, of calls whose deadline is over."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[2].expire
            self._look()

    def _look(self) -> None:
        self.next_due = self._heap[0][0] if self._heap else float("inf")
