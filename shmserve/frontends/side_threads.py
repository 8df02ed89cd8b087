"""Threads for what would hold up a loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from shmserve.errors import Unavailable

_WAITING = 64  # for each thread


class SideThreads:
    """At most `limit`, started when first needed; what comes beyond them waits for one, in a
    queue that has a bound, too.

    Args:
        setting: what `limit` is called; also an attribute.
        or_here: where the system has no thread at all, whoever submits runs the item itself.
    """

    def __init__(self, limit: int, setting: str, or_here: bool = True) -> None:
        self._or_here = or_here
        self._limit = limit
        self.setting = setting
        self._lock = threading.Lock()
        self._started = 0
        self._open = 0  # items that are waiting or being worked on
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, item: Callable[[], None]) -> None:
        """Have it called, by a thread that has nothing to do or a new one. It must not raise.

        Raises:
            Unavailable: too many wait already, or the system has no thread.
        """
        with self._lock:
            if self._open >= self._limit * _WAITING:
                raise Unavailable(f"the server has too much to do ({self.setting})")
            self._open += 1
            starting = self._started < min(self._open, self._limit)
            self._started += starting
        self._items.put(item)
        if starting:
            try:
                threading.Thread(target=self._run, name="beside", daemon=True).start()
            except RuntimeError:  # the system has none: those that are there will do it
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
        """Its threads end once they have done what waits."""
        with self._lock:
            started, self._started = self._started, 0
        for _ in range(started):
            self._items.put(None)

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Do what comes next; False: there is nothing more."""
        item = self._items.get()
        if item is None:
            return False
        item()
        with self._lock:
            self._open -= 1
        return True
