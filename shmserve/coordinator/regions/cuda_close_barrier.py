"""CUDA close barrier: answers an unregistration once executors have closed the GPU memory.

After the answer the owner may free the memory. Freeing memory still open in another process is
undefined (CUDA Runtime API, cudaIpcCloseMemHandle). So the answer waits for all executors with the
handle, but at most one second. An executor that still works on the memory, or whose model keeps a
reference, delays the answer no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from shmserve.protocol.control.region_messages import RegionAnswer

_PATIENCE_S = 1.0

Opened = set[tuple[int, str]]  # pairs of region number and executor


class _PendingClose(Struct, eq=False):
    process: str
    answer: RegionAnswer
    opened: Opened
    until: float


class CudaCloseBarrier:
    """Delayed answers. `answer` sends an answer to a frontend."""

    def __init__(self, answer: Callable[[str, RegionAnswer], None]) -> None:
        self._answer = answer
        self._given: dict[int, set[str]] = {}
        self.waiting: list[_PendingClose] = []  # while not empty, call `tick` soon

    def given(self, number: int, executor: str) -> None:
        """Note that an executor has been given a region's handle."""
        self._given.setdefault(number, set()).add(executor)

    def gone(self, numbers: Iterable[int]) -> Opened:
        """Forget unregistered regions. Return the executors that may still have the regions
        open."""
        return {(n, executor) for n in numbers for executor in self._given.pop(n, ())}

    def answer(self, process: str, answer: RegionAnswer, opened: Opened, now: float) -> None:
        """Send the answer once all `opened` regions are closed."""
        if opened:
            self.waiting.append(_PendingClose(process, answer, opened, now + _PATIENCE_S))
        else:
            self._answer(process, answer)

    def closed(self, executor: str, numbers: Collection[int]) -> None:
        """Note that an executor has closed regions, or could not open the regions."""
        for number in numbers:
            self._given.get(number, set()).discard(executor)
        closed = {(number, executor) for number in numbers}
        self._over(closed.__contains__)

    def ended(self, executor: str) -> None:
        """Note that an executor has ended, which closes all of its regions."""
        for executors in self._given.values():
            executors.discard(executor)
        self._over(lambda handle: handle[1] == executor)

    def tick(self, now: float) -> None:
        """Send overdue answers without waiting any longer."""
        self._end([pending for pending in self.waiting if now >= pending.until])

    def _over(self, closed: Callable[[tuple[int, str]], bool]) -> None:
        for pending in self.waiting:
            pending.opened.difference_update([h for h in pending.opened if closed(h)])
        self._end([pending for pending in self.waiting if not pending.opened])

    def _end(self, over: list[_PendingClose]) -> None:
        self.waiting = [pending for pending in self.waiting if pending not in over]
        for pending in over:
            self._answer(pending.process, pending.answer)
