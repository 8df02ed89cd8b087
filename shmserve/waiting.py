"""Waiting: how code of a process waits, and where long work runs.

By default a thread that waits is blocked. A thread that serves many connections at once (the loop
of an HTTP worker or a gRPC process) installs a `ThreadWaiter` for itself, and code that waits there
gives way to other code instead. So the same synchronous code serves HTTP workers, gRPC processes,
and WSGI servers with a thread for each request. All waits for another process, a client or a
contended lock go through here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

LARGE = 1 << 16  # bytes: to copy, check or encode fewer of a tensor holds nobody up

_Result = TypeVar("_Result")


class WaitEvent(Protocol):
    """As `threading.Event`; set by any thread, awaited where it was made."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    """Work that goes on by itself."""

    def join(self) -> None: ...


class DescriptorWait(Protocol):
    """A descriptor that is waited for, by one at a time."""

    def wait(self, deadline: float, events: int = ...) -> bool:
        """Wait until the descriptor may be ready for events of epoll, to be read if none are
        given; return False at the deadline (monotonic)."""
        ...


class LoopEvent(WaitEvent, Protocol):
    """An event of a `ThreadWaiter`."""

    def wait(self, timeout: float | None = None, readiness: Any = None) -> bool:
        """As `WaitEvent.wait`, and no longer than until `readiness` may be ready."""
        ...


class ThreadWaiter(Protocol):
    """What a thread that serves many at once does instead of blocking."""

    def watch(self, fd: int) -> DescriptorWait:
        """Return what waits for a new descriptor."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def pause(self) -> None: ...

    def event(self) -> LoopEvent: ...

    def start(self, work: Callable[[], None]) -> Task: ...

    def beside(self, work: Callable[..., _Result], *args: Any) -> _Result: ...

    def on_loop(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Have a greenlet of this waiter's loop call it. From any other thread, which waits."""
        ...


class _Installed(threading.local):
    """Of each thread; None: it may block."""

    waiter: ThreadWaiter | None = None


installed = _Installed()


def install(waiter: ThreadWaiter | None) -> None:
    """From now on this thread waits so; None: as any other."""
    installed.waiter = waiter


def sleep(seconds: float) -> None:
    """Go on later."""
    waiter = installed.waiter
    (time.sleep if waiter is None else waiter.sleep)(seconds)


def pause() -> None:
    """Let everybody else go on first who can, for one who never has to wait."""
    waiter = installed.waiter
    if waiter is not None:
        waiter.pause()


def event() -> WaitEvent:
    """One that whoever made it can wait for."""
    waiter = installed.waiter
    return threading.Event() if waiter is None else waiter.event()


def start(work: Callable[[], None], name: str) -> Task:
    """Have it done side by side with what goes on here.

    Raises:
        RuntimeError: the system has no thread for it.
    """
    waiter = installed.waiter
    if waiter is not None:
        return waiter.start(work)
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def beside(work: Callable[..., _Result], *args: Any) -> _Result:
    """Do what keeps a processor, a file or a lock for long where nobody else waits for it."""
    waiter = installed.waiter
    return work(*args) if waiter is None else waiter.beside(work, *args)


def beside_if_large(nbytes: int, work: Callable[..., _Result], *args: Any) -> _Result:
    """As `beside`, if so many bytes take long."""
    waiter = installed.waiter
    if waiter is None or nbytes < LARGE:
        return work(*args)
    return waiter.beside(work, *args)
