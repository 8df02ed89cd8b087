"""An executor's status page: waiting requests, busy time, counters and live sequences.

One segment with one writer, the executor. Words are 8 bytes, aligned, and stored through a cast
memoryview (never `struct.pack_into`, which zeroes first). Frontends use the first two words and
the live sequences as hints for choosing an executor. The coordinator reads the counters
(`core.stats.executor_counters`). No process trusts the words for more (I7).
"""

from hashlib import blake2b
from heapq import heappop, heappush

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.core.stats import executor_counters
from shmserve.shm.segment import Mapping, Segment

_PAGE = 4096
DEPTH = 0  # requests waiting or running
BUSY_SINCE = 8  # when the model began, in CLOCK_MONOTONIC ns; 0: idle; a separate cache line
RUNNING = 9  # requests that the model works on, part of DEPTH
VALUES = 10  # values that the model has reported about itself
THREADS = 11  # threads on which the backend runs the model; 0: the backend does not choose
COUNTERS = 16  # first word of the counters
_SEQUENCES = COUNTERS + executor_counters.NWORDS  # number of digest words in use
_FREE_SLOTS = _SEQUENCES + 1  # free slots for sequences
_DIGESTS = _SEQUENCES + 2  # digests of the live sequences; 0: unused word
MOST_SEQUENCES = 2048
SIZE = -(-(_DIGESTS + MOST_SEQUENCES) * 8 // _PAGE) * _PAGE


def digest(name: SequenceName) -> int:
    """Return the word that stands for a sequence on the page.

    If two digests are equal, a frontend may choose the wrong executor, which then answers that the
    sequence is unknown.
    """
    data = f"{name.owner} {type(name.id).__name__} {name.id}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1


class StatusPage:
    """The writer's side: `words`, of which `counters` begin at `COUNTERS`."""

    def __init__(self, epoch: str) -> None:
        self.segment = Segment(epoch, SIZE)
        self.words = self.segment.view.cast("Q")
        self.counters = self.words[COUNTERS:]
        # word number, by sequence with a digest on the page
        self._places: dict[SequenceName, int] = {}
        self._unused = _DIGESTS  # first word that was never used for a digest
        self._free: list[int] = []  # heap of used words that are free again

    @property
    def busy_since(self) -> int:
        return self.words[BUSY_SINCE]

    def show_sequence(self, sequence: SequenceName) -> None:
        """Publish that a sequence lives here. At most `MOST_SEQUENCES` sequences can be shown."""
        place = heappop(self._free) if self._free else self._unused
        self._unused = max(self._unused, place + 1)
        self._places[sequence] = place
        self.words[place] = digest(sequence)
        self.words[_SEQUENCES] = max(self.words[_SEQUENCES], place + 1 - _DIGESTS)

    def hide_sequence(self, sequence: SequenceName) -> None:
        """Publish that a sequence has ended here."""
        place = self._places.pop(sequence)
        heappush(self._free, place)
        self.words[place] = 0
        used = self.words[_SEQUENCES]
        while used and not self.words[_DIGESTS + used - 1]:
            used -= 1
        self.words[_SEQUENCES] = used

    def show_free_slots(self, count: int) -> None:
        self.words[_FREE_SLOTS] = count

    def show_threads(self, count: int) -> None:
        self.words[THREADS] = count

    def close(self) -> None:
        self.counters.release()
        self.words.release()
        self.segment.close()


class StatusView:
    """The reader's side, made from the fd that came with `ExecutorHello`."""

    def __init__(self, fd: int) -> None:
        self._mapping = Mapping(fd, SIZE)
        self._words = self._mapping.view.cast("Q")

    @property
    def depth(self) -> int:
        return self._words[DEPTH]

    @property
    def free_slots(self) -> int:
        """Number of sequences that could begin at once."""
        return self._words[_FREE_SLOTS]

    def has_sequence(self, number: int) -> bool:
        """Return True if a sequence with this digest lives on the executor."""
        used = min(self._words[_SEQUENCES], MOST_SEQUENCES)
        return number in self._words[_DIGESTS : _DIGESTS + used].tolist()
