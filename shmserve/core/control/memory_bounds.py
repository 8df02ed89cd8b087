"""Memory bounds: finds executors that use more memory than their model may use. Pure.

A page that several processes map counts for each of them in part. Counting these parts walks the
page tables, which takes some 5 ms for each GiB, while the number of mapped pages is always known.
So the parts are counted only if the mapped pages, less the other processes' parts at the last
count, exceed the bound. Between two counts the executor must have grown.

An executor that works or loads its model is measured at each look, other executors at every fifth
look. The coordinator looks once a second.
"""

from collections.abc import Callable
from dataclasses import dataclass

MAX_MEMORY = "max_memory"  # parameter of config.pbtxt

_IDLE_LOOKS = 5

Measure = Callable[[int], int | None]  # pid -> bytes, None if the process has ended


@dataclass(slots=True)
class _Watched:
    """Executor with a bound. `looks`: since the last measurement. `shared`: bytes of its pages
    that belonged to other processes, by the last count."""

    looks: int = 0
    shared: int = 0


class MemoryBounds:
    """Memory of all executors whose model has a bound.

    `mapped`: measures all pages of a process in full. `proportional`: measures the same pages, each
    divided by the number of processes that map the page.
    """

    def __init__(self, mapped: Measure, proportional: Measure) -> None:
        self._mapped = mapped
        self._proportional = proportional
        self._watched: dict[str, _Watched] = {}

    def looked(self, process: str, pid: int, bound: int, works: bool) -> int:
        """Look at an executor. Return the used bytes if they exceed the bound, else 0."""
        watched = self._watched.setdefault(process, _Watched())
        watched.looks += 1
        if not works and watched.looks < _IDLE_LOOKS:
            return 0
        watched.looks = 0
        mapped = self._mapped(pid)
        if mapped is None or mapped - watched.shared <= bound:
            return 0
        used = self._proportional(pid)
        if used is None:
            return 0
        watched.shared = mapped - used
        return used if used > bound else 0

    def gone(self, process: str) -> None:
        """Forget a process without a link."""
        self._watched.pop(process, None)
