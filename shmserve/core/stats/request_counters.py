"""Request counters of a frontend: outcomes of requests, by model version. Layout, writer, reader.

Rows follow the head of the page. Row 0 counts model versions without a row of their own (`OTHER`).
A row's name is complete before the number of rows in use includes the row. As many rows for keys
follow in the same way, with the number of requests sent with each key, and as many rows for
ensembles' batch sizes, with the requests of each size and the times of their steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

from msgspec import Struct, field

from shmserve import errors
from shmserve.core.stats.counter_pages import (
    BATCHES_WORD,
    BOUNDS_NS,
    BUCKETS,
    HEAD_WORDS,
    KEYS_WORD,
    MAGIC,
    MODELS_WORD,
    ROWS_WORD,
    Words,
    add_each,
    is_page,
)
from shmserve.core.stats.executor_counters import OTHER_SIZES


class Reason(IntEnum):
    """Reason of a failure; a row has a counter for each reason."""

    BAD_REQUEST = 0  # refused before any executor was asked; not a failure of the model
    QUEUE_FULL = 1
    NO_MEMORY = 2  # the pool is used up
    NO_EXECUTOR = 3  # no executor runs right now
    EXECUTOR_DIED = 4
    DEADLINE = 5
    CANCELLED = 6  # the client has gone
    MODEL = 7  # the model's own error
    INTERNAL = 8


COPIES = ("in", "batch", "out", "device")  # stages of the receipt
CACHE = ("hits", "hit_ns", "misses", "miss_ns")  # look-ups in the response cache
HITS, MISSES = CACHE.index("hits"), CACHE.index("misses")
OTHER = ("(other)", "")
MAX_COUNTED = 128  # model versions, and keys, with rows of their own per frontend
_NAME_WORDS = 36  # length in bytes, then "name/version"
_NAME_BYTES = (_NAME_WORDS - 1) * 8
_SUCCEEDED = _NAME_WORDS
_SUCCESS_NS = _SUCCEEDED + 1
_FAIL_NS = _SUCCEEDED + 2
_FAILURES = _SUCCEEDED + 3
_COPIED = _FAILURES + len(Reason)
_HISTOGRAM = _COPIED + len(COPIES)
_IN_FLIGHT = _HISTOGRAM + BUCKETS  # a gauge
_CACHE = _IN_FLIGHT + 1
ROW_WORDS = 80
OTHER_KEYS = "(other)"
_KEY_WORDS = 10  # length in bytes of the name, the name, requests
_KEY_BYTES = (_KEY_WORDS - 2) * 8
_KEY_COUNT = _KEY_WORDS - 1
BATCH = ("last_ms", "requests", "elements", "input_ns", "infer_ns", "output_ns")
_MAX_SIZES = 16  # batch sizes of an ensemble with rows of their own, per frontend
_BATCH_WORDS = _NAME_WORDS + 1 + len(BATCH)  # "name/version/size", the size, the values
_ROWS_WORDS = ROW_WORDS + _KEY_WORDS + _BATCH_WORDS  # one row of each kind
assert _CACHE + len(CACHE) <= ROW_WORDS


class RequestCounts(Struct, array_like=True):
    """Sums over frontends. `buckets`: histogram of the times of answered requests. `in_flight`:
    requests with executors now; 0 for ended frontends. `cache`: counts of cache look-ups, by
    `CACHE`. `batches`: for ensembles, batch elements -> values of the requests, by `BATCH`;
    `OTHER_SIZES`: all sizes without a row."""

    succeeded: int = 0
    success_ns: int = 0
    fail_ns: int = 0
    failures: list[int] = field(default_factory=lambda: [0] * len(Reason))
    copied: list[int] = field(default_factory=lambda: [0] * len(COPIES))
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    in_flight: int = 0
    cache: list[int] = field(default_factory=lambda: [0] * len(CACHE))
    batches: dict[int, list[int]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.succeeded + sum(self.failures)

    @property
    def failed(self) -> int:
        """Number of accepted requests that failed."""
        return sum(self.failures) - self.failures[Reason.BAD_REQUEST]

    def add(self, other: RequestCounts) -> None:
        """Add another frontend's counts."""
        self.succeeded += other.succeeded
        self.success_ns += other.success_ns
        self.fail_ns += other.fail_ns
        add_each(self.failures, other.failures)
        add_each(self.copied, other.copied)
        add_each(self.buckets, other.buckets)
        self.in_flight += other.in_flight
        add_each(self.cache, other.cache)
        for size, (last_ms, *values) in other.batches.items():
            row = self.batches.setdefault(size, [0] * len(BATCH))
            add_each(row, [max(0, last_ms - row[0]), *values])


def nwords(rows: int) -> int:
    """Return the words of a page for `rows` model versions and as many keys and batch sizes."""
    return HEAD_WORDS + (rows + 1) * _ROWS_WORDS


Key = TypeVar("Key", bound=Hashable)


class _NamedRows(Struct, Generic[Key]):
    """Rows of `words` words from `first` on, found by key. Row 0 counts keys without a row.
    `count_word`: index of the word with the number of rows in use."""

    first: int
    words: int
    name_bytes: int
    count_word: int
    places: dict[Key, int] = {}


class RequestCounters:
    """Writer of a page; not thread-safe. `words`: all zero; the size determines the number of
    rows."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._bytes = words.cast("B")
        self._limit = (len(words) - HEAD_WORDS) // _ROWS_WORDS
        first_key = HEAD_WORDS + self._limit * ROW_WORDS
        self._rows: _NamedRows[tuple[str, str]] = _NamedRows(
            HEAD_WORDS, ROW_WORDS, _NAME_BYTES, ROWS_WORD
        )
        self._keys: _NamedRows[str] = _NamedRows(first_key, _KEY_WORDS, _KEY_BYTES, KEYS_WORD)
        self._batches: _NamedRows[tuple[str, str, int]] = _NamedRows(
            first_key + self._limit * _KEY_WORDS, _BATCH_WORDS, _NAME_BYTES, BATCHES_WORD
        )
        self._sizes: dict[tuple[str, str], int] = {}  # number of rows for batch sizes, by ensemble
        words[ROWS_WORD] = words[KEYS_WORD] = words[BATCHES_WORD] = 1
        words[MODELS_WORD] = self._limit
        words[0] = MAGIC

    def ended(
        self, model: str, version: str, reason: Reason | None, ns: int, copied: Sequence[int] = ()
    ) -> None:
        """Count an ended request: answered, or failed with a reason, `ns` after its arrival.
        `copied`: bytes copied for the request, by stage."""
        words = self._words
        key, rows = (model, version), self._rows
        row = rows.places.get(key) or self._new_row(rows, key, f"{model}/{version}")
        if reason is None:
            words[row + _SUCCEEDED] += 1
            words[row + _SUCCESS_NS] += ns
            words[row + _HISTOGRAM + bisect_left(BOUNDS_NS, ns)] += 1
        else:
            words[row + _FAILURES + reason] += 1
            if reason is not Reason.BAD_REQUEST:
                words[row + _FAIL_NS] += ns
        for at, nbytes in enumerate(copied, row + _COPIED):
            if nbytes:
                words[at] += nbytes

    def copied_out(self, model: str, version: str, nbytes: int) -> None:
        """Count bytes of an answer that were copied after the request had been counted."""
        row = self._row_of(model, version)
        self._words[row + _COPIED + COPIES.index("out")] += nbytes

    def looked_up(self, model: str, version: str, hit: bool, ns: int) -> None:
        """Count a look-up in the response cache, which took `ns`."""
        row = self._row_of(model, version)
        at = row + _CACHE + (HITS if hit else MISSES)
        self._words[at] += 1
        self._words[at + 1] += ns

    def ran(self, model: str, version: str, size: int, values: Sequence[int]) -> None:
        """Count an ensemble's run for a request of `size` batch elements. `values`: by `BATCH`."""
        places = self._batches.places
        at = places.get((model, version, size)) or self._batch_row(model, version, size)
        at += _NAME_WORDS
        self._words[at + 1] = values[0]
        for index, value in enumerate(values[1:], at + 2):
            self._words[index] += value

    def _batch_row(self, model: str, version: str, size: int) -> int:
        """Return a new row for a batch size. The first row of an ensemble is for all sizes without
        a row, so an ensemble with many sizes loses no run, and takes no row of another ensemble."""
        rows, sizes = self._batches, self._sizes
        known = sizes.get((model, version))
        if known is None:
            sizes[model, version] = known = 0
            self._new_row(rows, (model, version, OTHER_SIZES), f"{model}/{version}/")
        if size and known < _MAX_SIZES and len(rows.places) < self._limit // 2:
            sizes[model, version] = known + 1
            at = self._new_row(rows, (model, version, size), f"{model}/{version}/{size}")
            self._words[at + _NAME_WORDS] = size
            return at
        return rows.places.get((model, version, OTHER_SIZES), rows.first)

    def show_in_flight(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the number of requests with executors now, by model version. Model versions not in
        `counts` get 0."""
        by_row = dict.fromkeys((HEAD_WORDS, *self._rows.places.values()), 0)
        for (model, version), count in counts.items():
            row = self._row_of(model, version)
            by_row[row] = by_row.get(row, 0) + count
        for row, count in by_row.items():
            self._words[row + _IN_FLIGHT] = count

    def keyed(self, name: str) -> None:
        """Count a request sent with the key of this name."""
        at = self._keys.places.get(name) or self._new_row(self._keys, name, name)
        self._words[at + _KEY_COUNT] += 1

    def _row_of(self, model: str, version: str) -> int:
        key, rows = (model, version), self._rows
        return rows.places.get(key) or self._new_row(rows, key, f"{model}/{version}")

    def _new_row(self, rows: _NamedRows[Key], key: Key, name: str) -> int:
        """Return the position of a new row, or of row 0 if there is no room."""
        number, text = len(rows.places) + 1, name.encode()
        if number >= self._limit or len(text) > rows.name_bytes:
            return rows.first
        at = rows.first + number * rows.words
        start = (at + 1) * 8
        self._bytes[start : start + len(text)] = text
        self._words[at] = len(text)
        self._words[rows.count_word] = number + 1
        rows.places[key] = at
        return at


def read(words: Words) -> dict[tuple[str, str], RequestCounts] | None:
    """Return the counts on a page by (model, version), or None if the page has another layout."""
    if not is_page(words, nwords(0)):
        return None
    rows_by_model: dict[tuple[str, str], RequestCounts] = {}
    rows = min(words[ROWS_WORD], _rows_of(words))
    for number in range(rows):
        at = HEAD_WORDS + number * ROW_WORDS
        counts = RequestCounts(
            words[at + _SUCCEEDED],
            words[at + _SUCCESS_NS],
            words[at + _FAIL_NS],
            list(words[at + _FAILURES : at + _COPIED]),
            list(words[at + _COPIED : at + _HISTOGRAM]),
            list(words[at + _HISTOGRAM : at + _HISTOGRAM + BUCKETS]),
            words[at + _IN_FLIGHT],
            list(words[at + _CACHE : at + _CACHE + len(CACHE)]),
        )
        if number:
            rows_by_model.setdefault(_name(words, at), RequestCounts()).add(counts)
        elif counts.requests or counts.in_flight or any(counts.copied):
            rows_by_model[OTHER] = counts
    first = HEAD_WORDS + _rows_of(words) * (ROW_WORDS + _KEY_WORDS)
    for number in range(1, min(words[BATCHES_WORD], _rows_of(words))):
        at = first + number * _BATCH_WORDS
        name, _ = _name(words, at)
        model, _, version = name.rpartition("/")
        size, *values = words[at + _NAME_WORDS : at + _BATCH_WORDS]
        if not any(values):
            continue
        counts = RequestCounts(batches={size or OTHER_SIZES: values})
        rows_by_model.setdefault((model, version), RequestCounts()).add(counts)
    return rows_by_model


def read_keys(words: Words) -> dict[str, int]:
    """Return requests by key name, on a page of this layout."""
    requests: dict[str, int] = {}
    models = _rows_of(words)
    for number in range(min(words[KEYS_WORD], models)):
        at = HEAD_WORDS + models * ROW_WORDS + number * _KEY_WORDS
        length = min(words[at], _KEY_BYTES)
        name = bytes(words[at + 1 : at + _KEY_COUNT])[:length].decode(errors="replace")
        if number or words[at + _KEY_COUNT]:
            name = name if number else OTHER_KEYS
            requests[name] = requests.get(name, 0) + words[at + _KEY_COUNT]
    return requests


def _rows_of(words: Words) -> int:
    """Return the largest number of rows of each kind on a page. The page's own number is not
    trusted."""
    return min(words[MODELS_WORD], (len(words) - HEAD_WORDS) // _ROWS_WORDS)


def _name(words: Words, at: int) -> tuple[str, str]:
    length = min(words[at], _NAME_BYTES)
    text = bytes(words[at + 1 : at + _NAME_WORDS])[:length].decode(errors="replace")
    model, _, version = text.rpartition("/")
    return model, version


_BY_KIND: tuple[tuple[type[BaseException], Reason], ...] = (
    (errors.QueueFull, Reason.QUEUE_FULL),
    (errors.ResourceExhausted, Reason.NO_MEMORY),
    (errors.ExecutorLost, Reason.EXECUTOR_DIED),
    (errors.WorkLost, Reason.NO_EXECUTOR),
    (errors.Unavailable, Reason.NO_EXECUTOR),
    (errors.DeadlineExceeded, Reason.DEADLINE),
    (errors.Cancelled, Reason.CANCELLED),
    (errors.ModelFailure, Reason.MODEL),
    (errors.InvalidArgument, Reason.BAD_REQUEST),
    (errors.NotFound, Reason.BAD_REQUEST),
    (errors.Unimplemented, Reason.BAD_REQUEST),
)
# Codes of failures found by the executor itself; any other error in an answer is the model's.
_BY_CODE = {
    errors.Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    errors.Code.CANCELLED: Reason.CANCELLED,
    errors.Code.RESOURCE_EXHAUSTED: Reason.NO_MEMORY,
}


def reason_of(error: BaseException) -> Reason:
    """Return the reason of a request that failed without an answer. An exception outside
    `shmserve.errors` comes from the end of a client's connection, or from a defect."""
    if isinstance(error, OSError | EOFError):
        return Reason.CANCELLED
    return next((r for kind, r in _BY_KIND if isinstance(error, kind)), Reason.INTERNAL)


def reason_of_answer(code: str) -> Reason:
    """Return the reason of a request that an executor answered with an error."""
    return _BY_CODE.get(errors.Code(code), Reason.MODEL)
