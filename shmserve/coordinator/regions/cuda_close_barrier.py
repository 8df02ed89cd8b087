"""Unregistrations of GPU memory, answered once executors have closed it.

Its owner may free what it has unregistered the next moment, and to free memory that is still
open in another process is undefined (CUDA Runtime API, cudaIpcCloseMemHandle). So the answer
waits for the executors that were given the handle, for a second at most: one that still works
on the memory, or whose model keeps it, holds up nobody for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from shmserve.protocol.control.region_messages import RegionAnswer

_PATIENCE_S = 1.0


class _Waiting:
    def __init__(
        self, process: str, answer: RegionAnswer, opened: set[tuple[int, str]], until: float
    ) -> None:
        self.process = process
        self.answer = answer
        self.opened = opened  # region and executor
        self.until = until


class Closing:
    """See the module. `answer` answers a frontend."""

    def __init__(self, answer: Callable[[str, RegionAnswer], None]) -> None:
        self._answer = answer
        self._given: dict[int, set[str]] = {}
        self._waiting: list[_Waiting] = []

    @property
    def waiting(self) -> bool:
        """Whether an answer waits, so `tick` should come soon."""
        return bool(self._waiting)

    def given(self, number: int, executor: str) -> None:
        """An executor has been given a region's handle."""
        self._given.setdefault(number, set()).add(executor)

    def gone(self, numbers: Iterable[int]) -> set[tuple[int, str]]:
        """Regions are no more; who may have them open still."""
        return {(n, executor) for n in numbers for executor in self._given.pop(n, ())}

    def answer(
        self, process: str, answer: RegionAnswer, opened: set[tuple[int, str]], now: float
    ) -> None:
        """Answer when these are closed."""
        if opened:
            self._waiting.append(_Waiting(process, answer, opened, now + _PATIENCE_S))
        else:
            self._answer(process, answer)

    def closed(self, executor: str, numbers: Collection[int]) -> None:
        """An executor has closed regions, or could not open them."""
        for number in numbers:
            self._given.get(number, set()).discard(executor)
        told = {(number, executor) for number in numbers}
        self._over(told.__contains__)

    def ended(self, executor: str) -> None:
        """With a process all it had open is closed."""
        for executors in self._given.values():
            executors.discard(executor)
        self._over(lambda one: one[1] == executor)

    def tick(self, now: float) -> None:
        """Wait no longer for those who let others wait."""
        self._end([one for one in self._waiting if now >= one.until])

    def _over(self, wanted: Callable[[tuple[int, str]], bool]) -> None:
        for one in self._waiting:
            one.opened = {each for each in one.opened if not wanted(each)}
        self._end([one for one in self._waiting if not one.opened])

    def _end(self, over: list[_Waiting]) -> None:
        self._waiting = [one for one in self._waiting if one not in over]
        for one in over:
            self._answer(one.process, one.answer)
