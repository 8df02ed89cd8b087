"""A process's page of counters in shared memory: made by the writer, read by the coordinator.

The coordinator does not map pages of other processes, but copies a page with `pread`. So a page
that its owner truncates causes an error, not a SIGBUS.
"""

import logging
import os
import sys

from shmserve.core.stats.counter_pages import Words
from shmserve.errors import ArenaExhausted
from shmserve.shm.segment import Segment

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # limit of a page to read


class OwnCounterPage:
    """The writer's side: `words` to count in, in a separate segment."""

    def __init__(self, epoch: str, nwords: int) -> None:
        self.nbytes = nwords * 8
        self._segment: Segment | None = None
        try:
            self._segment = Segment(epoch, self.nbytes)
            view = self._segment.view
        except ArenaExhausted as ex:  # requests are served even without statistics
            log.error("statistics lack the counts of this process: %s", ex)
            view = self._private()
        self.words = view.cast("Q")

    def _private(self) -> memoryview:
        return memoryview(bytearray(self.nbytes))

    def reader_fd(self) -> int | None:
        """Return a new descriptor for reading, which the caller closes, or None without a page."""
        return None if self._segment is None else self._segment.reader_fd()

    def close(self) -> None:
        """Free the segment. From now on `words` are private memory of this process."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            self.words = self._private().cast("Q")


def read_word(fd: int, index: int) -> int:
    """Return one word of a page as it is now; 0 if the page cannot be read."""
    try:
        return int.from_bytes(os.pread(fd, 8, index * 8), sys.byteorder)
    except OSError:
        return 0


def read(fd: int, nbytes: int) -> Words | None:
    """Return the page as it is now, or None if the page does not have the announced size."""
    if not 0 < nbytes <= MAX_BYTES or nbytes % 8:
        return None
    try:
        data = os.pread(fd, nbytes, 0)
    except OSError:
        return None
    return memoryview(data).cast("Q") if len(data) == nbytes else None
