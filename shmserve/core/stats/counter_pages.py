"""What all pages of counters have in common. Pure: a page is a memoryview of 64-bit words.

Every process that counts has a page of its own and is its only writer; the coordinator reads
them all and adds up, also after a process's death. A counter is one aligned word that only
grows, so no reader needs a lock: it sees each word as it was at some moment, and two words of
one page as they were at moments a few microseconds apart. Nothing but statistics is made of
what is read here (I7).

A page begins with `HEAD_WORDS` words: `MAGIC`, rows in use, then the gauges in their order. The
last two are of frontends: how many rows there are for model versions, and rows of keys in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

Words = memoryview  # of format "Q"

MAGIC = 0x73686D636E740001  # "shmcnt", layout 1
HEAD_WORDS = 16
ROWS_WORD = 1
_GAUGES = 2
MODELS_WORD = HEAD_WORDS - 2
KEYS_WORD = HEAD_WORDS - 1

# Upper bounds of the histograms' buckets; one more bucket has no bound. A duration belongs
# into the first whose bound is not less: `bisect_left(BOUNDS_NS, ns)`.
BOUNDS_NS = tuple(
    int(ms * 1e6)
    for ms in (
        *(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500),
        *(1000, 2500, 5000, 10000),
    )
)
BUCKETS = len(BOUNDS_NS) + 1


def cumulated(buckets: Sequence[int]) -> list[int]:
    """Counts up to each bound, as histograms are written."""
    return list(accumulate(buckets))


class Gauges(Struct, array_like=True):
    """What a process has right now; it says so about once a second."""

    slots: int = 0  # not free
    slot_bytes: int = 0
    arena_bytes: int = 0  # granted out of the pool
    connections: int = 0  # of clients
    abandoned: int = 0  # requests nobody waits for whose slots an executor may still read
    cache_bytes: int = 0  # of answers that are kept


_NAMES = Gauges.__struct_fields__


def write_gauges(words: Words, gauges: Gauges) -> None:
    for index, name in enumerate(_NAMES, _GAUGES):
        words[index] = getattr(gauges, name)


def read_gauges(words: Words) -> Gauges:
    return Gauges(*words[_GAUGES : _GAUGES + len(_NAMES)])


def is_page(words: Words, nwords: int) -> bool:
    """Whether this is a page of this layout with at least so many words."""
    return len(words) >= max(nwords, HEAD_WORDS) and words[0] == MAGIC


def add_each(into: list[int], values: Sequence[int]) -> None:
    for index, value in enumerate(values):
        into[index] += value
