"""Faults of one process: killed, a segfault, stopped, out of memory.

A fault is a context manager for a process id. It lasts as long as the caller stays in the context.
A process that has ended meanwhile is no error.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

Fault = Callable[[int], AbstractContextManager[None]]


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def killed(pid: int) -> Iterator[None]:
    send(pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def crashed(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSEGV)
    yield


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Allocations of the process fail. Children that it starts meanwhile keep the limit."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        feed(pid)


def feed(pid: int) -> None:
    """Let the process allocate memory again."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
