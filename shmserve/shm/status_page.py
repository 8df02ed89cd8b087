"""An executor's published words: how much is waiting, since when it is busy, what it has done.

One segment, one writer (the executor), 8-byte aligned words stored through a cast
memoryview (never `struct.pack_into`, which zeroes first). Frontends use the first two, and which
sequences live here, as hints for picking an executor; the coordinator reads the counters
(`core.stats.executor_counters`). Nobody trusts them for more (I7).
"""

from __future__ import annotations

from hashlib import blake2b
from heapq import heappop, heappush

from shmserve.core.stats import executor_counters
from shmserve.shm.segment import Mapping, Segment

_PAGE = 4096
DEPTH = 0  # requests waiting or running
BUSY_SINCE = 8  # when the model began, CLOCK_MONOTONIC ns, 0: idle; a cache line of its own
RUNNING = 9  # how many of DEPTH the model works on
VALUES = 10  # how many values the model has reported of itself
COUNTERS = 16  # from here on: a page of counters
_SEQUENCES = COUNTERS + executor_counters.NWORDS  # how many words of digests are in use
_FREE_SLOTS = _SEQUENCES + 1  # for sequences
_DIGESTS = _SEQUENCES + 2  # of the sequences that live here, 0: none
MOST_SEQUENCES = 2048
SIZE = -(-(_DIGESTS + MOST_SEQUENCES) * 8 // _PAGE) * _PAGE


def digest(sequence: int | str) -> int:
    """What stands for a sequence's id on the page. Whoever is led astray by two that are equal is
    told by the executor that it knows no such sequence."""
    data = f"{type(sequence).__name__} {sequence}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1


class StatusPage:
    """The writer's side: `words`, of which `counters` begin at `COUNTERS`."""

    def __init__(self, epoch: str) -> None:
        self.segment = Segment(epoch, SIZE)
        self.words = self.segment.view.cast("Q")
        self.counters = self.words[COUNTERS:]
        self._places: dict[int | str, int] = {}  # words, by the sequences whose digests are there
        self._unused = _DIGESTS  # from here on no word has had one
        self._free: list[int] = []  # a heap of those before it that have none any more

    @property
    def busy_since(self) -> int:
        return self.words[BUSY_SINCE]

    def show_sequence(self, sequence: int | str) -> None:
        """Tell that a sequence lives here. There are at most `MOST_SEQUENCES`."""
        place = heappop(self._free) if self._free else self._unused
        self._unused = max(self._unused, place + 1)
        self._places[sequence] = place
        self.words[place] = digest(sequence)
        self.words[_SEQUENCES] = max(self.words[_SEQUENCES], place + 1 - _DIGESTS)

    def hide_sequence(self, sequence: int | str) -> None:
        """Tell that it does not any more."""
        place = self._places.pop(sequence)
        heappush(self._free, place)
        self.words[place] = 0
        used = self.words[_SEQUENCES]
        while used and not self.words[_DIGESTS + used - 1]:
            used -= 1
        self.words[_SEQUENCES] = used

    def show_free_slots(self, count: int) -> None:
        self.words[_FREE_SLOTS] = count

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

    @property
    def free_slots(self) -> int:
        """How many sequences could begin at once."""
        return self._words[_FREE_SLOTS]

    def has_sequence(self, number: int) -> bool:
        """Whether a sequence with this digest lives there."""
        used = min(self._words[_SEQUENCES], MOST_SEQUENCES)
        return number in self._words[_DIGESTS : _DIGESTS + used].tolist()
