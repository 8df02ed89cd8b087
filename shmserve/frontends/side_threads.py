"""Threads for work that would hold up a loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from greenlet import GreenletExit

from shmserve.errors import Unavailable
from shmserve.waiting import WaitEvent

_WAITING = 64  # limit of open items for each thread
_Result = TypeVar("_Result")


class CallElsewhere(Generic[_Result]):
    """A call that another thread runs, with its result for the waiting thread or greenlet.

    Args:
        over: event that is set when the call has ended.
    """

    def __init__(self, over: WaitEvent, call: Callable[..., _Result], *args: Any) -> None:
        self._over = over
        self._call = call
        self._args = args
        self._results: list[Any] = []

    def run(self) -> None:
        """Run the call and keep its result or error. Only GreenletExit is raised, and leaves no
        result."""
        try:
            self._results.append((True, self._call(*self._args)))
        except GreenletExit:
            raise
        except BaseException as ex:
            self._results.append((False, ex))
        finally:
            self._over.set()

    @property
    def has_result(self) -> bool:
        return bool(self._results)

    def result(self) -> _Result:
        """Return the call's result, or raise its error. Call once, after the call has ended."""
        done, result = self._results.pop()
        if not done:
            raise result
        return result  # type: ignore[no-any-return]


class SideThreads:
    """At most `limit` threads, each started when first needed. Further items wait in a bounded
    queue.

    Args:
        setting: name of the setting with the limit, for error messages.
        or_here: if the system has no thread at all, the submitting thread runs the item.
    """

    def __init__(self, limit: int, setting: str, or_here: bool = True) -> None:
        self._or_here = or_here
        self._limit = limit
        self._setting = setting
        self._lock = threading.Lock()
        self._started = 0
        self._open = 0  # items that wait or run
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, item: Callable[[], None]) -> None:
        """Have an idle or new thread call `item`, which must not raise.

        Raises:
            Unavailable: too many items wait already, or the system has no thread.
        """
        with self._lock:
            if self._open >= self._limit * _WAITING:
                raise Unavailable(f"the server is overloaded ({self._setting})")
            self._open += 1
            starting = self._started < min(self._open, self._limit)
            self._started += starting
        self._items.put(item)
        if starting:
            try:
                threading.Thread(target=self._run, name="beside", daemon=True).start()
            # the system has no thread left: threads that run already take the item
            except RuntimeError:
                with self._lock:
                    self._started -= 1
                    alone = not self._started
                if alone:
                    self._work_without_threads()

    def _work_without_threads(self) -> None:
        if self._or_here:
            self._work()
            return
        self._items.get()
        with self._lock:
            self._open -= 1
        raise Unavailable("the server has no thread for the call now")

    def close(self) -> None:
        """End the threads once all waiting items are done."""
        with self._lock:
            started, self._started = self._started, 0
        for _ in range(started):
            self._items.put(None)

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Run the next item. Return False if the thread is to end, else True."""
        item = self._items.get()
        if item is None:
            return False
        item()
        with self._lock:
            self._open -= 1
        return True
