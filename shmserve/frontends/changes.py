"""Condition variable for the greenlets of one loop."""

from __future__ import annotations

from collections.abc import Callable

from shmserve import waiting


class Changes:
    """No lock: only the loop's thread looks, waits and tells."""

    __slots__ = ("_awaited",)

    def __init__(self) -> None:
        self._awaited: list[waiting.WaitEvent] = []

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Give way to other greenlets while this is so. `tell` has it looked at again."""
        while condition():
            changed = waiting.event()
            self._awaited.append(changed)
            changed.wait()

    def tell(self) -> None:
        """Wake every greenlet that waits."""
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for changed in awaited:
                changed.set()
