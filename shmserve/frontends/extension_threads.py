"""Threads for code of extensions that may block, beside the loop that serves everybody.

They are apart from the threads for the server's own work beside the loop, so that this work goes on
however long extensions block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmserve import waiting
from shmserve.errors import Unavailable
from shmserve.frontends.side_threads import CallElsewhere, SideThreads

_Result = TypeVar("_Result")


class ExtensionThreads:
    """At most `limit` threads, shared by all extensions of one process.

    Args:
        setting: name of the setting that `limit` is made from.
        patience_s: longest wait, in seconds, for a thread.
    """

    def __init__(self, limit: int, setting: str, patience_s: float) -> None:
        self._threads = SideThreads(limit, setting, or_here=False)  # it may block
        self._setting = setting
        self._patience_s = patience_s

    def call(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Run `work` in a thread, while the greenlet waits. A thread that may block runs it itself.

        Raises:
            Unavailable: no thread was free in time, or too many calls wait, or the system has none.
        """
        if waiting.installed.waiter is None:
            return work(*args)
        over = waiting.event()
        places: list[None] = [None]  # whoever takes it decides: the work runs, or never will
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
