"""Threads for extension code that may block, beside the loop that serves all clients.

These threads are separate from the threads for the server's own work beside the loop, so
extensions that block for long do not delay the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmserve import waiting
from shmserve.errors import Unavailable
from shmserve.frontends.side_threads import CallElsewhere, SideThreads

_Result = TypeVar("_Result")


class ExtensionThreads:
    """At most `limit` threads, shared by all extensions of one process. `setting`: name of the
    setting from which `limit` is computed. `patience_s`: longest wait, in seconds, for a thread."""

    def __init__(self, limit: int, setting: str, patience_s: float) -> None:
        # extension code may block, so never on the loop
        self._threads = SideThreads(limit, setting, or_here=False)
        self._setting = setting
        self._patience_s = patience_s

    def call(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Run `work` in a thread while the greenlet waits. Where no loop runs, run `work` in the
        calling thread. Raise Unavailable if no thread was free in time, too many calls wait, or the
        system has no thread."""
        if waiting.installed.waiter is None:
            return work(*args)
        over = waiting.event()
        # taken by the thread (the work runs) or by the waiter (the work never runs)
        places: list[None] = [None]
        elsewhere = CallElsewhere(over, work, *args)

        def run() -> None:
            if _taken(places):
                elsewhere.run()

        self._threads.submit(run)
        if not over.wait(self._patience_s) and _taken(places):
            seconds = f"{self._patience_s:g} s"
            raise Unavailable(f"no thread was free for this call in {seconds} ({self._setting})")
        over.wait()
        return elsewhere.result()


def _taken(places: list[None]) -> bool:
    try:
        places.pop()  # atomic
    except IndexError:
        return False
    return True
