"""Hub: the loop of one thread, whose greenlets wait for descriptors, times or other threads.

HTTP workers and the gRPC process run on a hub. In the gRPC process, handlers serve the sockets
instead of greenlets. The usual wait (for a client's next request, for an executor's answer) costs
no system call but `epoll_wait`.

Rules of the loop:

- Work that would hold up the loop runs beside it (`waiting.beside`), in at most `http_threads`
  threads, while the greenlet waits: making segments, inflating and compressing, JSON and
  classification from 64 KiB on, metrics, files. Questions to the coordinator wait on the loop.
- A lock may be held on the loop only if no greenlet switch happens meanwhile. Work that waits with
  a lock (an arena that grows) runs beside the loop, with all other work that takes the lock.
- A function that the loop calls back (`Hub.handle`, the end of a call, memory that is free) must
  not wait.

A greenlet that has finished is kept with its stack for the next run: mapping and unmapping a stack
of 16 KiB for each call would cost more.
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
from shmserve.transport.looking import LookingWait

_MAX_EVENTS = 256  # limit of events that one poll returns
_ENDINGS = 3  # attempts to end a greenlet, which may wait again while it ends
_RESTING = 64  # limit of idle greenlets kept for later runs
_LOOK_S = 1.0  # seconds between checks whether the awaited loop still runs

_Result = TypeVar("_Result")

_log = logging.getLogger("shmserve.loop")


class Readiness(TimedWait):
    """The wait of one greenlet at a time: for a descriptor, a deadline, or a wake-up. `fd`: the
    descriptor; -1 without a descriptor. `waiter`: the waiting greenlet; None if no greenlet
    waits."""

    __slots__ = ("_armed", "_hub", "_peers", "fd", "waiter")

    def __init__(self, hub: Hub, fd: int = -1, peers: int = 0) -> None:
        super().__init__(hub._timers)
        self._hub = hub
        self._peers = peers  # 1 for a process of this service, 0 for anything else
        self.fd = fd
        self._armed = 0  # events that the epoll set watches the descriptor for
        self.waiter: greenlet | None = None

    def wait(self, deadline: float, events: int = READ) -> bool:
        """Switch to the loop until the descriptor may be ready. Return False after the deadline."""
        if self._armed != events and self.fd >= 0:
            self._arm(events)
        self.waiter = getcurrent()
        self._deadline = deadline
        if deadline < self.filed:
            self._file()
        self._hub._peers_awaited += self._peers
        ready = bool(self._hub._main.switch())
        self._hub._peers_awaited -= self._peers
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
        """Drop the wait for the descriptor. Call before closing the descriptor."""
        waits = self._hub._descriptors.waits
        if waits.get(self.fd) is self:
            del waits[self.fd]

    def resume(self, ready: bool) -> None:
        """End the wait, if a greenlet waits."""
        if self.waiter is not None:
            self.waiter.switch(ready)


class Hub:
    """Loop of the thread that calls `run`; greenlets call the methods that wait.

    Args:
        threads: limit of threads beside the loop.
        setting: name of the setting with that limit.

    Attributes:
        at_turns_end: has the loop call a function once all events of this turn are handled.
        event: makes an event, as `waiting.event`.
        handle, unhandle: as in `Descriptors`.
        change: changes the watched events of a descriptor with a handler.
    """

    def __init__(self, threads: int, setting: str) -> None:
        self._main = getcurrent()
        self._thread = 0  # id of the thread that runs the loop
        self._descriptors: Descriptors[Readiness] = Descriptors()
        self._look = LookingWait(self._descriptors.epoll.poll, _MAX_EVENTS)
        self._peers_awaited = 0  # greenlets that wait for a process of this service
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
        self._living: set[greenlet] = set()  # greenlets that have begun and not ended
        self._resting: list[greenlet] = []  # idle greenlets among `_living`
        self._closed = False

    # ---------------------------------------------------------------- for the loop

    def run(self, until: float) -> None:
        """Resume greenlets as their waits end. Return at `until`, or after a call of `leave`."""
        timers, soon, descriptors = self._timers.heap, self._soon, self._descriptors
        poll, fresh, look = descriptors.epoll.poll, descriptors.fresh, self._look.wait
        waits, handlers = descriptors.waits, descriptors.handlers
        self._main = getcurrent()
        self._thread = get_ident()
        self._leaving = False
        while not self._leaving and (now := monotonic()) < until:
            if timers and timers[0][0] <= now:
                self._timers.look(now)
                continue
            wake_at = timers[0][0] if timers and timers[0][0] < until else until
            fresh.clear()
            timeout_s, awaited = 0.0 if soon else wake_at - now, self._peers_awaited
            # With several answers under way, a look would return after each answer: more turns.
            looks = awaited < 2
            found = look(timeout_s, awaited) if looks else poll(timeout_s, _MAX_EVENTS)
            for fd, events in found:
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
                # a bug in one callback must not stop the loop, which serves every client
                except Exception:
                    _log.exception("unexpected error in the loop")

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        # cleared before the queue is read, so that later calls wake the loop again
        self._signalled = False

    def leave(self) -> None:
        """Have `run` return after this turn."""
        self._leaving = True

    def close(self) -> None:
        """End all waiting greenlets, and resume none from now on. Call in the loop's thread: a
        greenlet that outlives its thread can crash the process on being freed."""
        self._closed = True
        self._resting.clear()
        for _ in range(_ENDINGS):
            for living in list(self._living):
                try:
                    living.throw()
                except BaseException:
                    _log.exception("a greenlet ended with an error")
        self._descriptors.epoll.close()
        self._threads.close()
        # At a thread's end, greenlet looks for other references to the thread's main greenlet. If
        # the hub is being collected as garbage at that moment, greenlet misses the hub's reference
        # and frees an object that is still in use.
        del self._main

    # not in `close`: threads beside the loop may write to the descriptor until now
    def __del__(self) -> None:
        os.close(self._wake_fd)

    # ------------------------------------------------------------------ for anybody

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call a function. From any thread."""
        self._soon.append(call)
        if not self._signalled and get_ident() != self._thread:  # else the loop is awake
            self._signalled = True
            os.eventfd_write(self._wake_fd, 1)

    def on_loop(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Have a greenlet call a function, and wait for the result. From any thread but the loop's.
        Raise Unavailable if the loop has ended."""
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
        """Run a function in a greenlet at once. Return when the greenlet first waits, or when the
        function ends. Raise SystemExit, which ends the process, if there is no memory for a
        greenlet: the function may hold places that nothing else would give back."""
        try:
            if self._resting:
                worker = self._resting.pop()
            else:
                worker = greenlet(self._run_all, self._main)
                self._living.add(worker)
                # up to its first wait for work: a greenlet keeps the arguments of its start alive
                worker.switch()
            worker.switch((run, args))
        except MemoryError:
            raise SystemExit("no memory is left for a greenlet") from None

    @property
    def is_busy(self) -> bool:
        """True if a greenlet has work that has not ended."""
        return len(self._living) > len(self._resting)

    def _run_all(self) -> None:
        """Run one function after another in one greenlet. Getting and giving back a stack costs
        more than many a function."""
        me = getcurrent()
        try:
            while True:
                run, args = self._main.switch()
                try:
                    run(*args)
                except Exception:
                    _log.exception("unexpected error in a greenlet")
                del run, args  # release all objects that the call refers to
                if self._closed or len(self._resting) >= _RESTING:
                    return
                self._resting.append(me)
        finally:
            self._living.discard(me)

    # ----------------------------------------------------------------- for greenlets

    def spawn(self, run: Callable[..., object], *args: Any) -> None:
        """Run a function in a greenlet from the next turn on. An error ends only that function."""
        self._soon.append(partial(self.enter, run, *args))

    def watch(self, fd: int, peers: int = 0) -> Readiness:
        """Return the `Readiness` of a new descriptor. `peers`: 1 for a channel to a process of
        this service, whose answers come sooner than clients' requests."""
        readiness = self._descriptors.waits[fd] = Readiness(self, fd, peers)
        return readiness

    def sleep(self, seconds: float) -> None:
        """Let other greenlets run for `seconds`."""
        Readiness(self).wait(monotonic() + seconds)

    def pause(self) -> None:
        """Let other greenlets run for one turn of the loop."""
        self._soon.append(getcurrent().switch)
        self._main.switch()

    def start(self, work: Callable[[], None]) -> HubTask:
        """Start a task, as `waiting.start`."""
        task = HubTask(self)
        self.spawn(task.run, work)
        return task

    def beside(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Run a function in a thread beside the loop while the greenlet waits, as `waiting.beside`.
        Raise Unavailable if too many functions wait for a thread already."""
        over = HubEvent(self)
        elsewhere = CallElsewhere(over, work, *args)
        self._threads.submit(elsewhere.run)
        over.wait()
        return elsewhere.result()


class HubEvent:
    """Event like `threading.Event`, for greenlets."""

    __slots__ = ("_hub", "_readiness", "_set")

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._readiness: Readiness | None = None  # the wait that `set` ends
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set the event and wake the waiting greenlet. From any thread."""
        self._set = True
        self._hub.soon(self._wake)

    def _wake(self) -> None:
        if self._readiness is not None:
            self._readiness.resume(True)

    def wait(self, timeout: float | None = None, readiness: Readiness | None = None) -> bool:
        """Wait until the event is set, `readiness` may be ready or the timeout is over. Return
        True if the event is set, else False. For one greenlet."""
        if not self._set:  # a later `set` is seen by the loop after the switch
            self._readiness = readiness = readiness or Readiness(self._hub)
            try:
                readiness.wait(inf if timeout is None else monotonic() + timeout)
            finally:
                self._readiness = None
        return self._set


class HubTask(HubEvent):
    """The work of a greenlet, which another greenlet can wait for."""

    __slots__ = ()

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self.set()

    def join(self) -> None:
        """Wait for the end of the work. For one greenlet."""
        self.wait()
