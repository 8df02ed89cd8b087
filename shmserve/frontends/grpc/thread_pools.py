"""Thread pools with a bound. What is beyond it is refused at once, on a thread for refusals.

gRPC's own limit counts calls of every kind together, so that inferences could keep out the
health checks that are to say so. Here each kind has a pool of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shmserve.errors import ResourceExhausted

T = TypeVar("T")

_local = threading.local()


class Refusals(ThreadPoolExecutor):
    """Runs what had no place elsewhere; `check_admitted` then raises."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="refusals")

    def refuse(self, why: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        return self.submit(_refused, why, fn, *args, **kwargs)


def _refused(why: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    _local.why = why
    try:
        return fn(*args, **kwargs)
    finally:
        _local.why = ""


def check_admitted() -> None:
    """To be called first by whatever runs in a pool.

    Raises:
        ResourceExhausted: it is here to be refused.
    """
    why = getattr(_local, "why", "")
    if why:
        raise ResourceExhausted(why)


class BoundedPool(ThreadPoolExecutor):
    """At most `threads` calls run and `limit` run or wait; `why` tells the others.

    Attributes:
        why: what those are told.
        count: calls that run, wait, or have a place reserved.
    """

    def __init__(self, name: str, threads: int, limit: int, refusals: Refusals, why: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._limit = limit
        self._refusals = refusals
        self.why = why
        self._lock = threading.Lock()
        self.count = 0

    def reserve(self) -> bool:
        """A place for `submit_reserved` or `give_back`; False: there is none."""
        with self._lock:
            free = self.count < self._limit
            self.count += free
        return free

    def give_back(self) -> None:
        """The reserved place is not needed."""
        with self._lock:
            self.count -= 1

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if not self.reserve():
            return self._refusals.refuse(self.why, fn, *args, **kwargs)
        return self.submit_reserved(fn, *args, **kwargs)

    def submit_reserved(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As `submit`, in a place that was reserved."""
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self.give_back())
        return future
