"""One thread, many greenlets: each waits for a descriptor, a time or another thread.

The loop of an HTTP worker, and of the gRPC process's own engine, whose sockets call back instead.

Level-triggered: an event that nobody waits for takes its descriptor out of the epoll set until
somebody does, so whoever waits looks at the kernel's present state and nothing is missed. The
usual wait (a client's next request, an executor's answer) costs no call but `epoll_wait`.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from shmserve.errors import Unavailable
from shmserve.frontends.readiness import READ, WRITE, Readiness
from shmserve.frontends.side_threads import SideThreads
from shmserve.waiting import Readable

_MOST_EVENTS = 256  # taken at a time
_ENDINGS = 3  # times that one is told to end, which may wait for something on its way out
_RESTING = 64  # greenlets that are kept for what runs next
_LOOK_S = 1.0  # until a thread that waits for the loop looks whether the loop is there
_FEW_TIMERS = 1024  # beyond them the dead are no more than the living

_Result = TypeVar("_Result")

_log = logging.getLogger("shmserve.loop")


class Hub:
    """The loop of one thread, which calls `run`; greenlets call what waits.

    Args:
        threads: how many there may be beside it.
        setting: what their number is called.

    Attributes:
        at_turns_end: has the loop call a function when what is ready now has been looked at.
    """

    def __init__(self, threads: int, setting: str) -> None:
        self._main = getcurrent()
        self._thread = 0  # that runs the loop
        self._epoll = select.epoll()
        self._watched: dict[int, Readiness] = {}
        self._timers: list[tuple[float, int, Readiness]] = []
        self._timers_most = _FEW_TIMERS
        self._numbers = itertools.count()
        self._soon: deque[Callable[[], object]] = deque()
        self.at_turns_end = self._soon.append
        self._signalled = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._fresh: set[int] = set()  # descriptors the epoll set got since it was looked at
        self.handle(self._wake_fd, self._woken)
        self._threads = SideThreads(threads, setting)
        self._leaving = False
        self._living: set[greenlet] = set()  # those that have begun and not ended
        self._resting: list[greenlet] = []  # of these, those that have nothing to run
        self._closed = False

    # ---------------------------------------------------------------- for the loop

    def run(self, until: float) -> None:
        """Let everybody go on whose wait is over, until then or until one calls `leave`."""
        timers, soon, watched, poll = self._timers, self._soon, self._watched, self._epoll.poll
        handlers, fresh = self._handlers, self._fresh
        self._main = getcurrent()
        self._thread = get_ident()
        self._leaving = False
        while not self._leaving and (now := monotonic()) < until:
            if timers and timers[0][0] <= now:
                self._expire(now)
                continue
            due = timers[0][0] if timers and timers[0][0] < until else until
            fresh.clear()
            for fd, events in poll(0.0 if soon else due - now, _MOST_EVENTS):
                if fd in fresh:  # it is told of one that was closed, and had this number
                    continue
                readiness = watched.get(fd)
                if readiness is None:
                    if (handler := handlers.get(fd)) is not None:
                        handler(events)
                elif (waiter := readiness.waiter) is None:
                    self._disarm(readiness)
                else:
                    readiness.waiter = None
                    readiness.due = inf
                    waiter.switch(True)
            for _ in range(len(soon)):
                try:
                    soon.popleft()()
                except Exception:  # a defect in one's doing, and the loop is everybody's
                    _log.exception("unexpected error in the loop")

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        self._signalled = False  # before looking: what comes from now on wakes again

    def _expire(self, now: float) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now:
            filed, _, readiness = heappop(timers)
            if filed != readiness.filed:  # it was filed again, for earlier
                continue
            readiness.filed = inf
            if readiness.due > now:
                self._file(readiness)
            else:
                self._resume(readiness, False)

    def _file(self, readiness: Readiness) -> None:
        if readiness.due < readiness.filed:
            readiness.filed = readiness.due
            heappush(self._timers, (readiness.due, next(self._numbers), readiness))
            if len(self._timers) > self._timers_most:
                self._drop_timers()

    def _drop_timers(self) -> None:
        """Those that nobody waits for any more, as connections that were closed leave them."""
        live = []
        for timer in self._timers:
            filed, _, readiness = timer
            if filed == readiness.filed:
                if readiness.due < inf:
                    live.append(timer)
                else:
                    readiness.filed = inf
        heapify(live)
        self._timers[:] = live
        self._timers_most = max(_FEW_TIMERS, 2 * len(live))

    def _resume(self, readiness: Readiness, ready: bool) -> None:
        waiter, readiness.waiter = readiness.waiter, None
        readiness.due = inf
        if waiter is not None:
            waiter.switch(ready)

    def _disarm(self, readiness: Readiness) -> None:
        readiness.armed = 0
        with suppress(OSError):  # it was closed meanwhile
            self._epoll.unregister(readiness.fd)

    def _arm(self, readiness: Readiness, events: int) -> None:
        if readiness.armed:
            self._epoll.modify(readiness.fd, events)
        else:
            self._epoll.register(readiness.fd, events)
            self._fresh.add(readiness.fd)
        readiness.armed = events

    def leave(self) -> None:
        """Have `run` return after this turn."""
        self._leaving = True

    def close(self) -> None:
        """Nobody goes on any more. In the loop's thread: what still waits ends here, since a
        greenlet that is left behind by its thread can bring down the process that frees it."""
        self._closed = True
        self._resting.clear()
        for _ in range(_ENDINGS):
            for one in list(self._living):
                try:
                    one.throw()
                except BaseException:
                    _log.exception("a greenlet ended with an error")
        self._epoll.close()
        self._threads.close()
        # The greenlet library looks at a thread's end for who else knows its main greenlet, misses
        # a hub that is being collected as garbage just then, and frees what that still refers to.
        del self._main

    def __del__(self) -> None:  # threads beside the loop may write to it until then
        os.close(self._wake_fd)

    # ------------------------------------------------------------------ for anybody

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call it. From any thread."""
        self._soon.append(call)
        if not self._signalled and get_ident() != self._thread:  # else the loop is awake
            self._signalled = True
            os.eventfd_write(self._wake_fd, 1)

    def on_loop(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Have a greenlet call it, and wait for the result. From any thread but the loop's.

        Raises:
            Unavailable: the loop has ended.
        """
        assert get_ident() != self._thread, "it would wait for itself"
        over = threading.Event()
        results: list[Any] = []

        def run() -> None:
            try:
                results.append((True, call(*args)))
            except Exception as ex:
                results.append((False, ex))
            finally:
                over.set()

        self.soon(partial(self.enter, run))
        while not over.wait(_LOOK_S) and not self._closed:
            pass
        if not results:
            raise Unavailable("the server is stopping")
        done, result = results.pop()
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    # ------------------------------------------------- for who is called by the loop

    def handle(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call it, which never waits, with the events of a descriptor, until `unhandle`. It must
        not raise."""
        self._watched.pop(fd, None)  # of one that was closed, and whose number this one has now
        self._handlers[fd] = handler
        self._epoll.register(fd, events)
        self._fresh.add(fd)

    def change(self, fd: int, events: int) -> None:
        """What such a descriptor is watched for."""
        self._epoll.modify(fd, events)

    def unhandle(self, fd: int) -> None:
        """Before it is closed. Idempotent."""
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError):  # whoever closes it next must get that far
                self._epoll.unregister(fd)

    def enter(self, run: Callable[..., object], *args: Any) -> None:
        """As `spawn`, at once: until it waits for something."""
        if self._resting:
            one = self._resting.pop()
        else:
            one = greenlet(self._run_all, self._main)
            self._living.add(one)
            one.switch()  # until it waits for work: what it begins with it would never let go of
        one.switch((run, args))

    @property
    def is_busy(self) -> bool:
        """Whether any has something to run."""
        return len(self._living) > len(self._resting)

    def _run_all(self) -> None:
        """What one greenlet runs, one after the other: each has memory for its stack, which costs
        more to get and to give back than many a run."""
        me = getcurrent()
        try:
            while True:
                run, args = self._main.switch()
                try:
                    run(*args)
                except Exception:
                    _log.exception("unexpected error in a greenlet")
                del run, args  # nothing that they refer to is kept
                if self._closed or len(self._resting) >= _RESTING:
                    return
                self._resting.append(me)
        finally:
            self._living.discard(me)

    # ----------------------------------------------------------------- for greenlets

    def spawn(self, run: Callable[..., object], *args: Any) -> None:
        """A greenlet that runs it, from the loop's next turn on. An error ends it alone."""
        self._soon.append(partial(self.enter, run, *args))

    def watch(self, fd: int) -> Readiness:
        """What waits for a descriptor that is new."""
        readiness = self._watched[fd] = Readiness(fd)
        return readiness

    def forget(self, readiness: Readiness) -> None:
        """Its descriptor is about to be closed."""
        if self._watched.get(readiness.fd) is readiness:
            del self._watched[readiness.fd]

    def forget_shared(self, readiness: Readiness) -> None:
        """As `forget`, of one that other processes have, too: closing it takes it out of no
        epoll set."""
        self._disarm(readiness)
        self.forget(readiness)

    def wait(self, readiness: Readiness, due: float, events: int = READ) -> bool:
        """Give way until it is ready, or may be; False: that time has come."""
        if readiness.armed != events and readiness.fd >= 0:
            self._arm(readiness, events)
        readiness.waiter = getcurrent()
        readiness.due = due
        if due < readiness.filed:
            self._file(readiness)
        return bool(self._main.switch())

    def readable(self, source: Readable, timeout_s: float | None) -> bool:
        """Give way until it has something to read; False: not within the timeout."""
        due = inf if timeout_s is None else monotonic() + timeout_s
        return self.wait(source.readiness or self._watch(source), due)

    def readable_unless(self, source: Readable, event: HubEvent, timeout_s: float) -> None:
        """As `readable`, and not once the event has been set."""
        if not event._set:
            event._readiness = source.readiness or self._watch(source)
            try:
                self.wait(event._readiness, monotonic() + timeout_s)
            finally:
                event._readiness = None

    def writable(self, source: Readable, timeout_s: float) -> bool:
        """Give way until its peer takes something; False: not within the timeout."""
        return self.wait(source.readiness or self._watch(source), monotonic() + timeout_s, WRITE)

    def _watch(self, source: Readable) -> Readiness:
        readiness = source.readiness = self.watch(source.fileno())
        return readiness

    def sleep(self, seconds: float) -> None:
        """Give way for so long."""
        self.wait(Readiness(), monotonic() + seconds)

    def pause(self) -> None:
        """Give way for one turn of the loop."""
        self._soon.append(getcurrent().switch)
        self._main.switch()

    def event(self) -> HubEvent:
        """As `waiting.event`."""
        return HubEvent(self)

    def start(self, work: Callable[[], None]) -> HubTask:
        """As `waiting.start`."""
        task = HubTask(self)
        self.spawn(task.run, work)
        return task

    def beside(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """As `waiting.beside`: in a thread, for which the greenlet waits.

        Raises:
            Unavailable: too much waits for a thread already.
        """
        over = HubEvent(self)
        results: list[Any] = []

        def run() -> None:
            try:
                results.append((True, work(*args)))
            except BaseException as ex:
                results.append((False, ex))
            over.set()

        self._threads.submit(run)
        over.wait()
        done, result = results.pop()
        if not done:
            raise result
        return result  # type: ignore[no-any-return]


class HubEvent:
    """As `threading.Event`, for a greenlet to wait for."""

    __slots__ = ("_hub", "_readiness", "_set")

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._readiness: Readiness | None = None  # whose wait ends when it is set
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wake whoever waits. From any thread."""
        self._set = True
        self._hub.soon(self._wake)

    def _wake(self) -> None:
        if self._readiness is not None:
            self._hub._resume(self._readiness, True)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set, as soon as it is or when the time is over. For one greenlet."""
        if not self._set:  # if it is set from now on, the loop hears of it after the switch
            due = inf if timeout is None else monotonic() + timeout
            self._readiness = Readiness()
            self._hub.wait(self._readiness, due)
        return self._set


class HubTask:
    """A greenlet that others can wait for."""

    def __init__(self, hub: Hub) -> None:
        self._over = HubEvent(hub)

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._over.set()

    def join(self) -> None:
        """Wait for its end. For one greenlet."""
        self._over.wait()
