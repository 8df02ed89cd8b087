"""The engine's thread: sockets call back, inferences wait as greenlets, and time passes.

It is the hub of `frontends.hub`, with what connections need of the time. Only this thread touches
what belongs to them; another one posts what it wants of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Protocol

from shmserve import waiting
from shmserve.frontends.descriptors import READ, WRITE
from shmserve.frontends.hub import Hub

_log = logging.getLogger("shmserve.grpc")

READABLE = READ
WRITABLE = WRITE
_LONGEST_S = 3600.0
_SWEEP_S = 0.5
_LAST_S = 2.0  # for greenlets whose calls have ended
_SLACK = 64  # deadlines of ended calls that are kept

Action = Callable[[], object]


class Expiring(Protocol):
    """A call with a deadline."""

    def is_active(self) -> bool: ...

    def expire(self) -> None:
        """Its deadline has passed."""
        ...


class EventLoop:
    """Everything but `post` belongs to the loop's thread, or comes before `run`.

    Args:
        threads: how many there may be for what would hold it up.

    Attributes:
        hub: for what waits, or is called.
    """

    def __init__(self, threads: int) -> None:
        self.hub = Hub(threads, "grpc_threads")
        self.at_turns_end = self.hub.at_turns_end
        self.enter = self.hub.enter
        self.post: Callable[[Action], None] = self.hub.soon
        self._timers: list[tuple[float, int, Action]] = []
        self._order = count()
        # Cleared of ended calls once these are more than half: most end before their deadlines
        self._deadlines: list[tuple[float, int, Expiring]] = []
        self._over = 0
        self._sweep_at = float("inf")
        self._looks_at = 0.0  # at the time
        self._stopped = False

    def at(self, when: float, action: Action) -> None:
        """Call this at a time, or a little later."""
        heappush(self._timers, (when, next(self._order), action))
        self._look_at(when)

    def deadline(self, when: float, call: Expiring) -> None:
        """Have it expire then, unless it is over before: `deadline_over`."""
        heappush(self._deadlines, (when, next(self._order), call))
        if when < self._looks_at:
            self.hub.leave()

    def deadline_over(self) -> None:
        """Note that a call with a deadline has ended."""
        self._over += 1
        if self._over > _SLACK and 2 * self._over > len(self._deadlines):
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_active()]
            heapify(self._deadlines)
            self._over = 0

    def touch(self, now: float) -> None:
        """Something has happened that the sweep is to look at."""
        if self._sweep_at > now + _SWEEP_S:
            self._sweep_at = now + _SWEEP_S
            self._look_at(self._sweep_at)

    def _look_at(self, when: float) -> None:
        if when < self._looks_at:
            self.hub.leave()

    def stop(self) -> None:
        self._stopped = True
        self.hub.leave()

    def run(self, sweep: Callable[[float], float] = lambda _: float("inf")) -> None:
        """Serve until `stop`. Call `sweep` with the time soon after a `touch`, and at the time that
        the last sweep has returned."""
        waiting.install(self.hub)
        try:
            while not self._stopped:
                self._looks_at = self._due()
                self.hub.run(self._looks_at)
                self._take_time(sweep)
            give_up = monotonic() + _LAST_S
            while self.hub.is_busy and monotonic() < give_up:
                self.hub.run(min(give_up, monotonic() + 0.01))
        finally:
            self.hub.close()
            waiting.install(None)

    def _due(self) -> float:
        """When there is something to do."""
        due = min(self._sweep_at, monotonic() + _LONGEST_S)
        if self._deadlines:
            due = min(due, self._deadlines[0][0])
        return min(due, self._timers[0][0]) if self._timers else due

    def _take_time(self, sweep: Callable[[float], float]) -> None:
        now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            guarded(heappop(self._timers)[2])
        while self._deadlines and self._deadlines[0][0] <= now:
            guarded(heappop(self._deadlines)[2].expire)
        if self._sweep_at <= now:
            self._sweep_at = max(sweep(now), now + _SWEEP_S)


def guarded(action: Action) -> None:
    """A defect in one call's doing must not end the loop."""
    try:
        action()
    except Exception:
        _log.exception("unexpected error in the loop")
