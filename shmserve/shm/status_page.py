"""An executor's published words: how much is waiting, and since when it is busy.

One page, one writer (the executor), 8-byte aligned words stored through a cast
memoryview (never `struct.pack_into`, which zeroes first). Readers use them as hints
for picking an executor; nobody trusts them for more (I7).
"""

from __future__ import annotations

from shmserve.shm.segment import Mapping, Segment

SIZE = 4096
_DEPTH = 0  # requests waiting or running
_BUSY_SINCE = 8  # CLOCK_MONOTONIC ns, 0: idle; a cache line of its own


class StatusPage:
    """The writer's side."""

    def __init__(self, epoch: str) -> None:
        self.segment = Segment(epoch, SIZE)
        self._words = self.segment.view.cast("Q")

    def set_depth(self, depth: int) -> None:
        self._words[_DEPTH] = depth

    def set_busy(self, since_ns: int) -> None:
        self._words[_BUSY_SINCE] = since_ns

    @property
    def busy_since(self) -> int:
        return self._words[_BUSY_SINCE]

    def close(self) -> None:
        self._words.release()
        self.segment.close()


class StatusView:
    """A reader's side, of the fd that came with `ExecutorHello`."""

    def __init__(self, fd: int) -> None:
        self._mapping = Mapping(fd, SIZE)
        self._words = self._mapping.view.cast("Q")

    @property
    def depth(self) -> int:
        return self._words[_DEPTH]
