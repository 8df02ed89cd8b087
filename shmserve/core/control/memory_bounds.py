"""Memory bounds: finds executors that use more memory than their model may use. Pure.

Anonymous memory counts: pages that a process has written. Mapped files do not count, because the
system drops their pages if memory is short, and reads the files again.

A page that several processes share since a fork counts for each process in part. Counting parts
walks the page tables, which takes some 5 ms for each GiB, while the number of pages is mostly
known. So parts are counted only if the number of pages exceeds the bound, or is unknown.

An executor that works or loads its model is measured at each look, other executors at every fifth
look. The coordinator looks once a second.
"""

from collections.abc import Callable

MAX_MEMORY = "max_memory"  # parameter of config.pbtxt

_IDLE_LOOKS = 5

Measure = Callable[[int], int | None]  # pid -> bytes, None if unknown


class MemoryBounds:
    """Memory of all executors whose model has a bound.

    `whole`: measures all pages of a process in full. `proportional`: measures the same pages, each
    divided by the number of processes with the page.
    """

    def __init__(self, whole: Measure, proportional: Measure) -> None:
        self._whole = whole
        self._proportional = proportional
        self._looks: dict[str, int] = {}  # since the last measurement, by process

    def looked(self, process: str, pid: int, bound: int, works: bool) -> int | None:
        """Look at an executor. Return the used bytes if they exceed the bound, else 0. Return None
        if the use is unknown."""
        looks = self._looks.get(process, 0) + 1
        is_due = works or looks >= _IDLE_LOOKS
        self._looks[process] = 0 if is_due else looks
        if not is_due:
            return 0
        whole = self._whole(pid)
        if whole is not None and whole <= bound:
            return 0
        used = self._proportional(pid)
        return used if used is None or used > bound else 0

    def gone(self, process: str) -> None:
        """Forget a process without a link."""
        self._looks.pop(process, None)
