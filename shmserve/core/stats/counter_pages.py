"""Counter pages: the common layout of all pages of counters. Pure: a page is a memoryview of
64-bit words.

Every counting process has a page of its own and is its only writer. The coordinator reads and adds
up all pages, also after a process's death. A counter is one aligned word that only grows, so no
reader needs a lock: a read returns each word as of some moment, and two words of one page as of
moments a few microseconds apart. The values are used for statistics only (I7), except the start of
a run, which delays the end of executors, and an uncounted answer, which delays reports; both within
a limit.

A page begins with `HEAD_WORDS` words: `MAGIC`, rows in use, then the gauges in order. The last five
are: a number for an answer that an executor has sent and not counted yet (0: none); then, of
frontends, rows of ensembles' batch sizes in use, start of the oldest run of an ensemble under way
(CLOCK_MONOTONIC, in nanoseconds; 0: none), number of rows for model versions, and rows of keys in
use.
"""

from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

Words = memoryview  # with format "Q"

MAGIC = 0x73686D636E740002  # "shmcnt", layout 2
HEAD_WORDS = 16
ROWS_WORD = 1
_GAUGES = 2
UNCOUNTED_WORD = HEAD_WORDS - 5
BATCHES_WORD = HEAD_WORDS - 4
OLDEST_RUN_WORD = HEAD_WORDS - 3
MODELS_WORD = HEAD_WORDS - 2
KEYS_WORD = HEAD_WORDS - 1

# Upper bounds of the histograms' buckets; one more bucket has no bound. A duration belongs to the
# first bucket whose bound is not less: `bisect_left(BOUNDS_NS, ns)`.
BOUNDS_NS = tuple(
    int(ms * 1e6)
    for ms in (
        *(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500),
        *(1000, 2500, 5000, 10000),
    )
)
BUCKETS = len(BOUNDS_NS) + 1


def cumulated(buckets: Sequence[int]) -> list[int]:
    """Return cumulative counts up to each bound, as histograms are written."""
    return list(accumulate(buckets))


class Gauges(Struct, array_like=True):
    """Current values of a process, updated about once a second."""

    slots: int = 0  # slots that are not free
    slot_bytes: int = 0
    arena_bytes: int = 0  # granted from the pool
    connections: int = 0  # connected clients
    abandoned: int = 0  # requests without a waiting caller, whose slots an executor may still read
    cache_bytes: int = 0  # bytes of cached answers


_NAMES = Gauges.__struct_fields__


def write_gauges(words: Words, gauges: Gauges) -> None:
    for index, name in enumerate(_NAMES, _GAUGES):
        words[index] = getattr(gauges, name)


def read_gauges(words: Words) -> Gauges:
    return Gauges(*words[_GAUGES : _GAUGES + len(_NAMES)])


def is_page(words: Words, nwords: int) -> bool:
    """Return True if this is a page of this layout with at least `nwords` words."""
    return len(words) >= max(nwords, HEAD_WORDS) and words[0] == MAGIC


def add_each(into: list[int], values: Sequence[int]) -> None:
    for index, value in enumerate(values):
        into[index] += value
