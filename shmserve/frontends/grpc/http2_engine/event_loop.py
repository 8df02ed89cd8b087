"""One thread that waits for descriptors, for the time, and for what other threads post."""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from time import monotonic

from shmserve.frontends.grpc.http2_engine.timers import Deadlines

_log = logging.getLogger("shmserve.grpc")

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
_MOST_EVENTS = 256
_LONGEST_S = 3600.0
_SWEEP_S = 0.5

Ready = Callable[[int], None]  # of the events of a descriptor
Action = Callable[[], None]


class EventLoop:
    """Everything but `post` belongs to the thread that is in `run`, or comes before it.

    Attributes:
        now: the time of `time.monotonic` when this turn began.
        deadlines: of calls.
        sweep: called with the time, soon after a `touch` and whenever it said it wants to.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READABLE)
        self._ready: dict[int, Ready] = {self._wake: self._woken}
        self._posts: deque[Action] = deque()
        self._signalled = False
        self._timers: list[tuple[float, int, Action]] = []
        self._order = count()
        self._turn_ends: list[Action] = []
        self._stopped = False
        self.now = monotonic()
        self.deadlines = Deadlines()
        self.sweep: Callable[[float], float] = lambda now: float("inf")
        self._sweep_at = float("inf")

    def post(self, action: Action) -> None:
        """Have this called in the loop's thread; from any thread. Lost if the loop has ended."""
        self._posts.append(action)
        if not self._signalled:
            self._signalled = True
            try:
                os.eventfd_write(self._wake, 1)
            except OSError:
                pass  # the loop has ended

    def add(self, fd: int, ready: Ready, events: int = READABLE) -> None:
        self._ready[fd] = ready
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        del self._ready[fd]
        self._epoll.unregister(fd)

    def forget(self, fd: int) -> None:
        """As `remove`, if it was added."""
        if fd in self._ready:
            self.remove(fd)

    def at(self, when: float, action: Action) -> None:
        """Call this at a time, or a little later."""
        heappush(self._timers, (when, next(self._order), action))

    def touch(self) -> None:
        """Something has happened that the sweep is to look at."""
        if self._sweep_at > self.now + _SWEEP_S:
            self._sweep_at = self.now + _SWEEP_S

    def at_turns_end(self, action: Action) -> None:
        """Call this when everything that is ready now has been looked at."""
        self._turn_ends.append(action)

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stopped:
                self._turn()
        finally:
            self._epoll.close()
            # Its number may be another's soon, so nobody is to write to it any more
            self._signalled = True
            os.close(self._wake)

    def _turn(self) -> None:
        for fd, events in self._epoll.poll(self._patience(), _MOST_EVENTS):
            ready = self._ready.get(fd)
            if ready is not None:
                self.now = monotonic()
                ready(events)
        self.now = now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            guarded(heappop(self._timers)[2])
        for overdue in self.deadlines.passed(now):
            guarded(overdue)
        if self._sweep_at <= now:
            self._sweep_at = max(self.sweep(now), now + _SWEEP_S)
        while self._turn_ends:
            actions, self._turn_ends = self._turn_ends, []
            for action in actions:
                guarded(action)

    def _patience(self) -> float:
        due = min(self.deadlines.next_due, self._sweep_at)
        if self._timers:
            due = min(due, self._timers[0][0])
        return min(max(due - monotonic(), 0.0), _LONGEST_S)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)
        self._signalled = False  # before looking: what is posted from now on wakes again
        posts = self._posts
        for _turn in range(len(posts)):
            guarded(posts.popleft())
        if posts and not self._signalled:
            self._signalled = True
            os.eventfd_write(self._wake, 1)


def guarded(action: Action) -> None:
    """A defect in one call's doing must not end the loop."""
    try:
        action()
    except Exception:
        _log.exception("unexpected error in the loop")
