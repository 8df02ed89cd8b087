"""A process's page of counters as memory: made by its writer, read by the coordinator.

The reader does not map what others own: it copies the page with `pread`, so that a page cut
short by its owner is an error and no SIGBUS.
"""

from __future__ import annotations

import logging
import os

from shmserve.core.stats.counter_pages import Words
from shmserve.errors import ArenaExhausted
from shmserve.shm.segment import Segment

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # of a page that is read


class OwnCounterPage:
    """The writer's side: `words` to count on, a segment of its own."""

    def __init__(self, epoch: str, nwords: int) -> None:
        self.nbytes = nwords * 8
        self._segment: Segment | None = None
        try:
            self._segment = Segment(epoch, self.nbytes)
            view = self._segment.view
        except ArenaExhausted as ex:  # requests are worth more than statistics
            log.error("this process counts for itself only: %s", ex)
            view = self._private()
        self.words = view.cast("Q")

    def _private(self) -> memoryview:
        return memoryview(bytearray(self.nbytes))

    def reader_fd(self) -> int | None:
        """A new descriptor for reading, the caller's; None: there is no shared page."""
        return None if self._segment is None else self._segment.reader_fd()

    def close(self) -> None:
        """Let go of the segment; from now on `words` are this process's own."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            self.words = self._private().cast("Q")


def read(fd: int, nbytes: int) -> Words | None:
    """The page as it is now; None: it is not there as announced."""
    if not 0 < nbytes <= MAX_BYTES or nbytes % 8:
        return None
    try:
        data = os.pread(fd, nbytes, 0)
    except OSError:
        return None
    return memoryview(data).cast("Q") if len(data) == nbytes else None
