"""Executor counters: runs of an executor's one model version. Layout, writer and reader.

A request is counted here when the model has answered it. Frontends count the outcomes seen by
clients (answered, failed and why), in `core.stats.request_counters`.
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct, field

from shmserve.core.stats.counter_pages import (
    BOUNDS_NS,
    BUCKETS,
    HEAD_WORDS,
    MAGIC,
    Words,
    add_each,
    is_page,
)

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
BATCH_ROWS = 64  # the last row counts all sizes without a row of their own
RESPONSE_ROWS = 33  # the last row counts all higher indexes
OTHER_SIZES = -1  # "size" of the last row of batches
RESPONSE = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")

# Values derived from other words have no word: the reader computes them.
_LAST = HEAD_WORDS
_OTHER_ELEMENTS = _LAST + 1  # batch elements of executions in the last row of batches
_QUEUE_NS = _LAST + 2
_SHARED_NS = _LAST + 3  # input, infer, output: time of requests beyond the first of a batch
_HISTOGRAMS = _SHARED_NS + 3
_INPUT, _INFER, _OUTPUT = (_HISTOGRAMS + index * BUCKETS for index in (1, 2, 3))
_BATCHES = _HISTOGRAMS + len(STAGES) * BUCKETS
_BATCH_WORDS = 5  # size, executions, ns of input, infer, output
_LAST_BATCH = _BATCHES + (BATCH_ROWS - 1) * _BATCH_WORDS
_RESPONSES = _BATCHES + BATCH_ROWS * _BATCH_WORDS
_RESPONSE_WORDS = 2 * len(RESPONSE)  # count and ns of each
NWORDS = _RESPONSES + RESPONSE_ROWS * _RESPONSE_WORDS


def _zeros(count: int) -> list[int]:
    return [0] * count


class ExecutorCounts(Struct, array_like=True):
    """Sums over executors of one model version.

    Attributes:
        last_inference_ms: wall clock of the latest execution by any executor.
        inferences: batch elements of all executions.
        executions: number of answered runs of the model.
        requests: number of requests answered by the model.
        stage_ns: time of the requests by stage.
        buckets: histograms of these times, by stage.
        batches: batch elements -> executions, and ns of input, infer and output.
        responses: for decoupled models, response index -> count and ns of each of `RESPONSE`.
    """

    last_inference_ms: int = 0
    inferences: int = 0
    executions: int = 0
    requests: int = 0
    stage_ns: list[int] = field(default_factory=lambda: _zeros(len(STAGES)))
    buckets: list[list[int]] = field(default_factory=lambda: [_zeros(BUCKETS) for _ in STAGES])
    batches: dict[int, list[int]] = field(default_factory=dict)
    responses: dict[int, list[int]] = field(default_factory=dict)

    def add(self, other: ExecutorCounts) -> None:
        """Add another executor's counts."""
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        self.inferences += other.inferences
        self.executions += other.executions
        self.requests += other.requests
        add_each(self.stage_ns, other.stage_ns)
        for sums, values in zip(self.buckets, other.buckets, strict=True):
            add_each(sums, values)
        for rows, more in ((self.batches, other.batches), (self.responses, other.responses)):
            for key, values in more.items():
                add_each(rows.setdefault(key, _zeros(len(values))), values)

    def add_batches(self, size: int, values: list[int]) -> None:
        """Add the executions of one batch size, given as a row of `batches`."""
        self.batches[size] = values
        self.executions += values[0]
        self.inferences += values[0] * max(size, 0)
        for index in (1, 2, 3):
            self.stage_ns[index] += values[index]


class ExecutorCounters:
    """Writer of a page. `words`: at least `NWORDS`, all zero."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._batches: dict[int, int] = {}
        words[0] = MAGIC

    def executed(
        self, batch: int, now_ms: int, input_ns: int, infer_ns: int, output_ns: int, queue_ns: int
    ) -> None:
        """Count an answered run on a batch of `batch` elements, and its first request, which
        waited for `queue_ns`. A single call, because most batches have one request."""
        words = self._words
        words[_LAST] = now_ms
        at = self._batches.get(batch) or self._new_batch(batch)
        words[at + 1] += 1
        words[at + 2] += input_ns
        words[at + 3] += infer_ns
        words[at + 4] += output_ns
        if at == _LAST_BATCH:
            words[_OTHER_ELEMENTS] += batch
        words[_QUEUE_NS] += queue_ns
        words[_HISTOGRAMS + bisect_left(BOUNDS_NS, queue_ns)] += 1
        words[_INPUT + bisect_left(BOUNDS_NS, input_ns)] += 1
        words[_INFER + bisect_left(BOUNDS_NS, infer_ns)] += 1
        words[_OUTPUT + bisect_left(BOUNDS_NS, output_ns)] += 1

    def shared(self, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count a further request of the last executed batch."""
        words = self._words
        words[_QUEUE_NS] += queue_ns
        words[_HISTOGRAMS + bisect_left(BOUNDS_NS, queue_ns)] += 1
        at = _INPUT
        for index, ns in enumerate((input_ns, infer_ns, output_ns), _SHARED_NS):
            words[index] += ns
            words[at + bisect_left(BOUNDS_NS, ns)] += 1
            at += BUCKETS

    def iterated(
        self, runs: int, batch: int, now_ms: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Count `runs` runs with these total times, on a batch of `batch` requests. Any of the
        requests may run again; `finished` counts the requests."""
        words = self._words
        words[_LAST] = now_ms
        at = self._batches.get(batch) or self._new_batch(batch)
        words[at + 1] += runs
        if at == _LAST_BATCH:
            words[_OTHER_ELEMENTS] += batch * runs
        for index, ns in enumerate((input_ns, infer_ns, output_ns)):
            words[at + 2 + index] += ns
            words[_SHARED_NS + index] += ns * (batch - 1)

    def finished(self, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count a request that has ended after one run or several, with its total times."""
        words = self._words
        words[_QUEUE_NS] += queue_ns
        at = _HISTOGRAMS
        for ns in (queue_ns, input_ns, infer_ns, output_ns):
            words[at + bisect_left(BOUNDS_NS, ns)] += 1
            at += BUCKETS

    def response(self, index: int, outcome: str, infer_ns: int, output_ns: int) -> None:
        """Count response number `index` of a decoupled request. `outcome`: success, fail,
        empty_response or cancel (the last two have no output)."""
        row = _RESPONSES + min(index, RESPONSE_ROWS - 1) * _RESPONSE_WORDS
        self._response(row, "compute_infer", infer_ns)
        if outcome in ("success", "fail"):
            self._response(row, "compute_output", output_ns)
        self._response(row, outcome, infer_ns + output_ns)

    def _response(self, row: int, what: str, ns: int) -> None:
        at = row + 2 * RESPONSE.index(what)
        self._words[at] += 1
        self._words[at + 1] += ns

    def _new_batch(self, batch: int) -> int:
        row = len(self._batches)
        at = _BATCHES + min(row, BATCH_ROWS - 1) * _BATCH_WORDS
        if row < BATCH_ROWS - 1:
            self._words[at] = batch
            self._batches[batch] = at
        return at


def read(words: Words) -> ExecutorCounts | None:
    """Return the counts on a page, or None if the page has another layout."""
    if not is_page(words, NWORDS):
        return None
    histograms = [
        list(words[at : at + BUCKETS])
        for at in range(_HISTOGRAMS, _HISTOGRAMS + len(STAGES) * BUCKETS, BUCKETS)
    ]
    counts = ExecutorCounts(
        words[_LAST],
        words[_OTHER_ELEMENTS],
        requests=sum(histograms[0]),
        stage_ns=list(words[_QUEUE_NS : _SHARED_NS + 3]),
        buckets=histograms,
    )
    for row in range(BATCH_ROWS):
        at = _BATCHES + row * _BATCH_WORDS
        values = list(words[at + 1 : at + _BATCH_WORDS])
        if not values[0]:
            continue
        size = words[at] if row < BATCH_ROWS - 1 else OTHER_SIZES
        counts.add_batches(size, values)
    for row in range(RESPONSE_ROWS):
        at = _RESPONSES + row * _RESPONSE_WORDS
        if words[at]:
            counts.responses[row] = list(words[at : at + _RESPONSE_WORDS])
    return counts
