"""An executor's published words: how much is waiting, since when it is busy, what it has done.

One segment, one writer (the executor), 8-byte aligned words stored through a cast
memoryview (never `struct.pack_into`, which zeroes first). Frontends use the first two as
hints for picking an executor; the coordinator reads the counters (`core.stats.executor_counters`).
Nobody trusts them for more (I7).
"""

from __future__ import annotations

from shmserve.core.stats import executor_counters
from shmserve.shm.segment import Mapping, Segment

_PAGE = 4096
DEPTH = 0  # requests waiting or running
BUSY_SINCE = 8  # when the model began, CLOCK_MONOTONIC ns, 0: idle; a cache line of its own
COUNTERS = 16  # from here on: a page of counters
SIZE = -(-(COUNTERS + executor_counters.NWORDS) * 8 // _PAGE) * _PAGE


class StatusPage:
    """The writer's side: `words`, of which `counters` begin at `COUNTERS`."""

    def __init__(self, epoch: str) -> None:
        self.segment = Segment(epoch, SIZE)
        self.words = self.segment.view.cast("Q")
        self.counters = self.words[COUNTERS:]

    @property
    def busy_since(self) -> int:
        return self.words[BUSY_SINCE]

    def close(self) -> None:
        self.counters.release()
        self.words.release()
        self.segment.close()


class StatusView:
    """A reader's side, of the fd that came with `ExecutorHello`."""

    def __init__(self, fd: int) -> None:
        self._mapping = Mapping(fd, SIZE)
        self._words = self._mapping.view.cast("Q")

    @property
    def depth(self) -> int:
        return self._words[DEPTH]
