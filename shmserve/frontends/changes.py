"""Condition variable for the greenlets of one loop."""

from collections.abc import Callable

from shmserve import waiting


class Changes:
    """Condition variable without a lock: only the loop's thread checks, waits and notifies."""

    __slots__ = ("_awaited",)

    def __init__(self) -> None:
        self._awaited: list[waiting.WaitEvent] = []

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Let other greenlets run while `condition` is true. Each `tell` has it checked again."""
        while condition():
            changed = waiting.event()
            self._awaited.append(changed)
            changed.wait()

    def tell(self) -> None:
        """Wake every waiting greenlet."""
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for changed in awaited:
                changed.set()
