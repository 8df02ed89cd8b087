"""Unregistrations of GPU memory, answered once executors have closed it.

Its owner may free what it has unregistered the next moment, and to free memory that is still
open in another process is undefined (CUDA Runtime API, cudaIpcCloseMemHandle). So the answer
waits for the executors that were given the handle, for a second at most: one that still works
on the memory, or whose model keeps it, holds up nobody for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from shmserve.protocol.control.region_messages import RegionAnswer

_PATIENCE_S = 1.0

Opened = set[tuple[int, str]]  # region and executor


class _PendingClose(Struct, eq=False):
    process: str
    answer: RegionAnswer
    opened: Opened
    until: float


class CudaCloseBarrier:
    """Answers that wait. `answer` answers a frontend."""

    def __init__(self, answer: Callable[[str, RegionAnswer], None]) -> None:
        self._answer = answer
        self._given: dict[int, set[str]] = {}
        self.waiting: list[_PendingClose] = []  # with any `tick` should come soon

    def given(self, number: int, executor: str) -> None:
        """An executor has been given a region's handle."""
        self._given.setdefault(number, set()).add(executor)

    def gone(self, numbers: Iterable[int]) -> Opened:
        """Regions are no more; who may have them open still."""
        return {(n, executor) for n in numbers for executor in self._given.pop(n, ())}

    def answer(self, process: str, answer: RegionAnswer, opened: Opened, now: float) -> None:
        """Answer when these are closed."""
        if opened:
            self.waiting.append(_PendingClose(process, answer, opened, now + _PATIENCE_S))
        else:
            self._answer(process, answer)

    def closed(self, executor: str, numbers: Collection[int]) -> None:
        """An executor has closed regions, or could not open them."""
        for number in numbers:
            self._given.get(number, set()).discard(executor)
        closed = {(number, executor) for number in numbers}
        self._over(closed.__contains__)

    def ended(self, executor: str) -> None:
        """With a process all it had open is closed."""
        for executors in self._given.values():
            executors.discard(executor)
        self._over(lambda handle: handle[1] == executor)

    def tick(self, now: float) -> None:
        """Wait no longer for those who let others wait."""
        self._end([pending for pending in self.waiting if now >= pending.until])

    def _over(self, closed: Callable[[tuple[int, str]], bool]) -> None:
        for pending in self.waiting:
            pending.opened.difference_update([h for h in pending.opened if closed(h)])
        self._end([pending for pending in self.waiting if not pending.opened])

    def _end(self, over: list[_PendingClose]) -> None:
        self.waiting = [pending for pending in self.waiting if pending not in over]
        for pending in over:
            self._answer(pending.process, pending.answer)
