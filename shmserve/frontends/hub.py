"""One thread, many greenlets: each waits for a descriptor, a time or another thread.

The loop of an HTTP worker, and of the gRPC process, whose sockets call back instead. The usual wait
(a client's next request, an executor's answer) costs no system call but `epoll_wait`.

Rules of the loop:

- Work that would hold up the loop runs beside it (`waiting.beside`), in at most `http_threads`
  threads for which the greenlet waits: making segments, inflating and compressing, JSON and
  classification from 64 KiB on, metrics, files. Questions to the coordinator wait on the loop.
- A lock may be held on the loop only where nothing gives way while it is held. Work that waits with
  a lock (an arena that grows) is beside the loop, with all other work that wants that lock.
- A function that the loop calls back (`Hub.handle`, the end of a call, memory that is free) must
  not wait.

A greenlet that has run to its end is kept for what runs next, with its stack: 16 KiB that would be
mapped and unmapped for each call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from shmserve.errors import Unavailable
from shmserve.frontends.descriptors import READ, Descriptors
from shmserve.frontends.side_threads import CallElsewhere, SideThreads
from shmserve.frontends.timers import TimedWait, Timers

_MOST_EVENTS = 256  # taken at a time
_ENDINGS = 3  # times that one is told to end, which may wait for something on its way out
_RESTING = 64  # greenlets that are kept for what runs next
_LOOK_S = 1.0  # until a thread that waits for the loop looks whether the loop is there

_Result = TypeVar("_Result")

_log = logging.getLogger("shmserve.loop")


class Readiness(TimedWait):
    """What one greenlet at a time waits for: a descriptor, a deadline, or to be woken.

    Attributes:
        fd: the descriptor; -1: there is none.
        waiter: the greenlet that waits; None: none does.
    """

    __slots__ = ("_armed", "_hub", "fd", "waiter")

    def __init__(self, hub: Hub, fd: int = -1) -> None:
        super().__init__(hub._timers)
        self._hub = hub
        self.fd = fd
        self._armed = 0  # events that the epoll set has the descriptor for
        self.waiter: greenlet | None = None

    def wait(self, deadline: float, events: int = READ) -> bool:
        """Give way until the descriptor may be ready; return False at the deadline."""
        if self._armed != events and self.fd >= 0:
            self._arm(events)
        self.waiter = getcurrent()
        self._deadline = deadline
        if deadline < self.filed:
            self._file()
        ready = bool(self._hub._main.switch())
        self.waiter = None
        self._deadline = inf
        return ready

    def _arm(self, events: int) -> None:
        self._hub._descriptors.arm(self.fd, events, modify=self._armed != 0)
        self._armed = events

    def disarm(self) -> None:
        """Take the descriptor out of the epoll set until the next wait."""
        self._armed = 0
        self._hub._descriptors.disarm(self.fd)

    def forget(self) -> None:
        """Called before the descriptor is closed."""
        waits = self._hub._descriptors.waits
        if waits.get(self.fd) is self:
            del waits[self.fd]

    def forget_shared(self) -> None:
        """As `forget`, where other processes have the descriptor as well: closing it takes it out
        of no epoll set."""
        self.disarm()
        self.forget()

    def resume(self, ready: bool) -> None:
        """End the wait, if somebody waits."""
        if self.waiter is not None:
            self.waiter.switch(ready)


class Hub:
    """The loop of one thread, which calls `run`; greenlets call what waits.

    Args:
        threads: how many there may be beside it.
        setting: what their number is called.

    Attributes:
        at_turns_end: has the loop call a function when what is ready now has been looked at.
        event: as `waiting.event`.
        handle, unhandle: as `Descriptors` has them.
        change: changes the events that a descriptor with a handler is watched for.
    """

    def __init__(self, threads: int, setting: str) -> None:
        self._main = getcurrent()
        self._thread = 0  # that runs the loop
        self._descriptors: Descriptors[Readiness] = Descriptors()
        self._timers = Timers()
        self._soon: deque[Callable[[], object]] = deque()
        self.at_turns_end = self._soon.append
        self.event = partial(HubEvent, self)
        self._signalled = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.handle = self._descriptors.handle
        self.unhandle = self._descriptors.unhandle
        self.change = self._descriptors.epoll.modify
        self.handle(self._wake_fd, self._woken)
        self._threads = SideThreads(threads, setting)
        self._leaving = False
        self._living: set[greenlet] = set()  # those that have begun and not ended
        self._resting: list[greenlet] = []  # of these, those that have nothing to run
        self._closed = False

    # ---------------------------------------------------------------- for the loop

    def run(self, until: float) -> None:
        """Let everybody go on whose wait is over, until then or until one calls `leave`."""
        timers, soon, descriptors = self._timers.heap, self._soon, self._descriptors
        poll, fresh = descriptors.epoll.poll, descriptors.fresh
        waits, handlers = descriptors.waits, descriptors.handlers
        self._main = getcurrent()
        self._thread = get_ident()
        self._leaving = False
        while not self._leaving and (now := monotonic()) < until:
            if timers and timers[0][0] <= now:
                self._timers.look(now)
                continue
            due = timers[0][0] if timers and timers[0][0] < until else until
            fresh.clear()
            for fd, events in poll(0.0 if soon else due - now, _MOST_EVENTS):
                if fd in fresh:  # an event of a closed descriptor that had the same number
                    continue
                readiness = waits.get(fd)
                if readiness is None:
                    if (handler := handlers.get(fd)) is not None:
                        handler(events)
                elif (waiter := readiness.waiter) is None:
                    readiness.disarm()
                else:
                    waiter.switch(True)
            for _ in range(len(soon)):
                try:
                    soon.popleft()()
                except Exception:  # a bug in one callback must not stop the loop of all
                    _log.exception("unexpected error in the loop")

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        self._signalled = False  # before looking: what comes from now on wakes again

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
        self._descriptors.epoll.close()
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
        elsewhere = CallElsewhere(over, call, *args)
        self.soon(partial(self.enter, elsewhere.run))
        while not over.wait(_LOOK_S) and not self._closed:
            pass
        if not elsewhere.has_result:
            raise Unavailable("the server is stopping")
        return elsewhere.result()

    # ------------------------------------------------- for who is called by the loop

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
        """Return what waits for a new descriptor."""
        readiness = self._descriptors.waits[fd] = Readiness(self, fd)
        return readiness

    def sleep(self, seconds: float) -> None:
        """Give way for so long."""
        Readiness(self).wait(monotonic() + seconds)

    def pause(self) -> None:
        """Give way for one turn of the loop."""
        self._soon.append(getcurrent().switch)
        self._main.switch()

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
        elsewhere = CallElsewhere(over, work, *args)
        self._threads.submit(elsewhere.run)
        over.wait()
        return elsewhere.result()


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
            self._readiness.resume(True)

    def wait(self, timeout: float | None = None, readiness: Readiness | None = None) -> bool:
        """Wait until the event is set, `readiness` may be ready or the timeout is over; return
        whether the event is set. For one greenlet."""
        if not self._set:  # if it is set from now on, the loop hears of it after the switch
            self._readiness = readiness = readiness or Readiness(self._hub)
            try:
                readiness.wait(inf if timeout is None else monotonic() + timeout)
            finally:
                self._readiness = None
        return self._set


class HubTask(HubEvent):
    """The work of a greenlet, whose end another greenlet can wait for."""

    __slots__ = ()

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self.set()

    def join(self) -> None:
        """Wait for the end of the work. For one greenlet."""
        self.wait()
