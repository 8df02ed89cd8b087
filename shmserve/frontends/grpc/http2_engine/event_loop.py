"""The engine's thread: socket callbacks, greenlets of inferences, and timers.

The loop is the hub of `frontends.hub` with timers for connections. Only this thread touches
objects of the loop. Other threads post functions.
"""

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
_LAST_S = 2.0  # for greenlets to end after their calls
_SLACK = 64  # deadlines of ended calls that are kept

Action = Callable[[], object]


class Expiring(Protocol):
    """A call with a deadline."""

    def is_active(self) -> bool: ...

    def expire(self) -> None:
        """End the call, because its deadline has passed."""
        ...


class EventLoop:
    """Loop of the engine; `hub` runs greenlets and calls handlers. All methods but `post` belong to
    the loop's thread, or are called before `run`. `threads`: limit of threads for work that would
    hold up the loop."""

    def __init__(self, threads: int) -> None:
        self.hub = Hub(threads, "grpc_threads")
        self.at_turns_end = self.hub.at_turns_end
        self.enter = self.hub.enter
        self.post: Callable[[Action], None] = self.hub.soon
        self._timers: list[tuple[float, int, Action]] = []
        self._order = count()
        # Most calls end before their deadline. Deadlines of ended calls are dropped once more than
        # half of all deadlines belong to ended calls.
        self._deadlines: list[tuple[float, int, Expiring]] = []
        self._over = 0
        self._sweep_at = float("inf")
        self._looks_at = 0.0  # when the hub's run ends for timed work
        self._stopped = False

    def at(self, when: float, action: Action) -> None:
        """Call `action` at a time, or a little later."""
        heappush(self._timers, (when, next(self._order), action))
        self._look_at(when)

    def deadline(self, when: float, call: Expiring) -> None:
        """Have the call expire at a time, unless the call ends before (see `deadline_over`)."""
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
        """Have the sweep run soon."""
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
        """Serve until `stop`. Call `sweep` with the present time: soon after a `touch`, and at the
        time that the latest sweep returned."""
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
        """Return the time of the next timed work."""
        when = min(self._sweep_at, monotonic() + _LONGEST_S)
        if self._deadlines:
            when = min(when, self._deadlines[0][0])
        return min(when, self._timers[0][0]) if self._timers else when

    def _take_time(self, sweep: Callable[[float], float]) -> None:
        now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            guarded(heappop(self._timers)[2])
        while self._deadlines and self._deadlines[0][0] <= now:
            guarded(heappop(self._deadlines)[2].expire)
        if self._sweep_at <= now:
            self._sweep_at = max(sweep(now), now + _SWEEP_S)


def guarded(action: Action) -> None:
    """Run an action and log its exception: a bug in one call must not end the loop."""
    try:
        action()
    except Exception:
        _log.exception("unexpected error in the loop")
