"""One thread that waits for descriptors, for the time, and for what other threads post.

Only who has the turn may touch what belongs to the loop. While the loop waits nobody has it, and
what another thread would have it do for a finished call that thread does itself: it is awake.
"""

from __future__ import annotations

import logging
import os
import select
import threading
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
    """Everything but `post` and `do` belongs to whoever has the turn, or comes before `run`.

    Attributes:
        now: the time of `time.monotonic` when this turn, or a part of it, began.
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
        self._turn = threading.Lock()
        self._sleeps_until = 0.0
        self._stopped = False
        self.now = monotonic()
        self.deadlines = Deadlines()
        self.sweep: Callable[[float], float] = lambda now: float("inf")
        self._sweep_at = float("inf")

    def post(self, action: Action) -> None:
        """Have this called in the loop's thread, or by who is in `do`; from any thread, whatever
        locks it has. Lost if the loop has ended."""
        self._posts.append(action)
        self._wake_up()

    def do(self, action: Action) -> None:
        """Call this here, after what was posted before, or have it called if another thread has the
        turn. From any thread that has no lock that actions take."""
        self._posts.append(action)
        if not self._turn.acquire(blocking=False):
            return  # who has it looks at what was posted after giving it back
        try:
            self.now = monotonic()
            self._do_posted()
            self._end_turn()
            early = self._due() < self._sleeps_until
        finally:
            self._turn.release()
        if early or self._posts:
            self._wake_up()

    def _wake_up(self) -> None:
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
                patience = (
                    0.0
                    if self._posts
                    else min(max(self._sleeps_until - monotonic(), 0.0), _LONGEST_S)
                )
                ready = self._epoll.poll(patience, _MOST_EVENTS)
                with self._turn:
                    self._take_turn(ready)
        finally:
            with self._turn:
                self._stopped = True
                self._epoll.close()
                # Its number may be another's soon, so nobody is to write to it any more
                self._signalled = True
                os.close(self._wake)

    def _take_turn(self, found: list[tuple[int, int]]) -> None:
        for fd, events in found:
            ready = self._ready.get(fd)
            if ready is not None:
                self.now = monotonic()
                ready(events)
        self.now = now = monotonic()
        if self._posts:
            self._do_posted()
        while self._timers and self._timers[0][0] <= now:
            guarded(heappop(self._timers)[2])
        if self.deadlines.next_due <= now:
            for overdue in self.deadlines.passed(now):
                guarded(overdue)
        if self._sweep_at <= now:
            self._sweep_at = max(self.sweep(now), now + _SWEEP_S)
        self._end_turn()
        self._sleeps_until = self._due()

    def _end_turn(self) -> None:
        while self._turn_ends:
            actions, self._turn_ends = self._turn_ends, []
            for action in actions:
                guarded(action)

    def _due(self) -> float:
        """When there is something to do."""
        due = min(self.deadlines.next_due, self._sweep_at)
        return min(due, self._timers[0][0]) if self._timers else due

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)
        self._signalled = False  # before looking: what is posted from now on wakes again

    def _do_posted(self) -> None:
        """What was posted until now; what these post comes after what is ready."""
        posts = self._posts
        for _ in range(len(posts)):
            guarded(posts.popleft())


def guarded(action: Action) -> None:
    """A defect in one call's doing must not end the loop."""
    try:
        action()
    except Exception:
        _log.exception("unexpected error in the loop")
