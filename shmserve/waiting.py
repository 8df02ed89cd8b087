"""Waiting: how code of a process waits, and where long work runs.

By default a thread that waits is blocked. A thread that serves many connections at once (the loop
of an HTTP worker or a gRPC process) installs a `ThreadWaiter` for itself. Code that waits in such
a thread gives way to other code instead. So the same synchronous code serves HTTP workers, gRPC
processes, and WSGI servers with a thread for each request. All waits for another process, a client
or a contended lock go through this module.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

LARGE = 1 << 16  # bytes: copying, checking or encoding less of a tensor delays no other code

_Result = TypeVar("_Result")


class WaitEvent(Protocol):
    """Event like `threading.Event`: set by any thread, awaited in the thread that made it."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    """Work that runs concurrently."""

    def join(self) -> None: ...


class DescriptorWait(Protocol):
    """Wait for a descriptor, by one caller at a time."""

    def wait(self, deadline: float, events: int = ...) -> bool:
        """Wait until the descriptor may be ready for epoll `events`, by default to be read. Return
        False at the deadline (monotonic)."""
        ...


class LoopEvent(WaitEvent, Protocol):
    """Event of a `ThreadWaiter`."""

    def wait(self, timeout: float | None = None, readiness: Any = None) -> bool:
        """Wait as `WaitEvent.wait`, but end when `readiness` may be ready."""
        ...


class ThreadWaiter(Protocol):
    """Waiting in a thread that serves many connections and must not block."""

    def watch(self, fd: int, peers: int = 0) -> DescriptorWait:
        """Return the wait for a new descriptor. `peers`: 1 for a channel to a process of this
        service, else 0."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def pause(self) -> None: ...

    def event(self) -> LoopEvent: ...

    def start(self, work: Callable[[], None]) -> Task: ...

    def beside(self, work: Callable[..., _Result], *args: Any) -> _Result: ...

    def on_loop(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Have a greenlet of this loop run `call`; return the result. The caller waits."""
        ...


class _Installed(threading.local):
    """The waiter of each thread; None: the thread may block."""

    waiter: ThreadWaiter | None = None


installed = _Installed()


def install(waiter: ThreadWaiter | None) -> None:
    """Set this thread's waiter; None: the thread blocks, as by default."""
    installed.waiter = waiter


def sleep(seconds: float) -> None:
    """Wait for some seconds."""
    waiter = installed.waiter
    (time.sleep if waiter is None else waiter.sleep)(seconds)


def pause() -> None:
    """Let other code that is ready go first, for code that never has to wait."""
    waiter = installed.waiter
    if waiter is not None:
        waiter.pause()


def event() -> WaitEvent:
    """Return an event that this thread can wait for."""
    waiter = installed.waiter
    return threading.Event() if waiter is None else waiter.event()


def start(work: Callable[[], None], name: str) -> Task:
    """Start work concurrently with the caller. Raise RuntimeError if the system has no thread for
    the work."""
    waiter = installed.waiter
    if waiter is not None:
        return waiter.start(work)
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def beside(work: Callable[..., _Result], *args: Any) -> _Result:
    """Run long work (on a processor, file or lock) off the loop, and return the result."""
    waiter = installed.waiter
    return work(*args) if waiter is None else waiter.beside(work, *args)


def beside_if_large(nbytes: int, work: Callable[..., _Result], *args: Any) -> _Result:
    """Run work as `beside` if `nbytes` are many, else here."""
    waiter = installed.waiter
    if waiter is None or nbytes < LARGE:
        return work(*args)
    return waiter.beside(work, *args)
