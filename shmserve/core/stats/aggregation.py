"""Aggregation: rates, percentages and times of a period, made of counters. Pure.

The counts of a process for a model version form a flat row of integers ("counts"), so growth, sums
and comparisons take one line each. `of_model` and `of_all` turn the row of a period into numbers,
for a second as for a month.
"""

from collections.abc import Sequence
from math import nan

from shmserve.core.stats.counter_pages import BOUNDS_NS, BUCKETS
from shmserve.core.stats.executor_counters import STAGES, ExecutorCounts
from shmserve.core.stats.request_counters import COPIES, Reason, RequestCounts

_SUCCEEDED, _SUCCESS_NS, _FAILURES = 0, 1, 2
_COPIED = _FAILURES + len(Reason)
_HISTOGRAM = _COPIED + len(COPIES)
_EXECUTIONS = _HISTOGRAM + BUCKETS
_INFERENCES, _RAN, _STAGE_NS = _EXECUTIONS + 1, _EXECUTIONS + 2, _EXECUTIONS + 3
WIDTH = _STAGE_NS + len(STAGES)
_NO_REQUESTS = [0] * _EXECUTIONS
_NO_RUNS = [0] * (WIDTH - _EXECUTIONS)

# Percentages of the latency distribution, as GRPS numbers them: 100 stands for 99.9 and 101 for
# 99.99.
PERCENTS = (*range(10, 91, 10), *range(91, 100), 99.9, 99.99)

MODEL_COLUMNS = (
    "requests",  # per second
    "failed",  # percent of requests
    "latency_avg",  # milliseconds, of answered requests; also the next four
    "latency_p50",
    "latency_p90",
    "latency_p99",
    "latency_max",
    "executions",  # per second
    "batch",  # elements per execution
    "queue",  # milliseconds, of requests answered by the model; also the next
    "compute",
    "copied",  # bytes per second
)
ALL_COLUMNS = (
    *MODEL_COLUMNS,
    *(f"failed_{reason.name.lower()}" for reason in Reason),  # per second
    *(f"copied_{stage}" for stage in COPIES),  # bytes per second
    *(f"bucket_{index}" for index in range(BUCKETS)),  # answered requests
)


def from_requests(counts: RequestCounts) -> list[int]:
    answered = (counts.succeeded, counts.success_ns)
    return [*answered, *counts.failures, *counts.copied, *counts.buckets, *_NO_RUNS]


def from_runs(counts: ExecutorCounts) -> list[int]:
    runs = (counts.executions, counts.inferences, counts.requests)
    return [*_NO_REQUESTS, *runs, *counts.stage_ns]


def growth(now: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """Return the growth between two readings of one process's counters, which never shrink."""
    return [max(0, new - old) for new, old in zip(now, earlier, strict=True)]


def failures(counts: Sequence[int]) -> Sequence[int]:
    """Return the counts of failures by `Reason`."""
    return counts[_FAILURES:_COPIED]


def slowest_ns(counts: Sequence[int]) -> int:
    """Return an upper bound for the time of the slowest answered request, as tight as the counters
    allow.

    The slowest request lies in the highest non-empty bucket. Its time is at most the sum of all
    times minus the least times that the buckets of all other requests allow. For a single request
    the bound is exact.
    """
    histogram, answered = _histogram(counts)
    if not answered:
        return 0
    top = max(index for index, count in enumerate(histogram) if count)
    least = [0, *BOUNDS_NS]
    others = sum(count * least[index] for index, count in enumerate(histogram)) - least[top]
    bound_ns = counts[_SUCCESS_NS] - others
    if top < len(BOUNDS_NS):
        bound_ns = min(bound_ns, BOUNDS_NS[top])
    return max(bound_ns, least[top])  # sum and buckets were not read in the same instant


def quantile_ns(counts: Sequence[int], percent: float, top_ns: int) -> float:
    """Return the time within which `percent` of the requests were answered, interpolated within a
    bucket. `top_ns`: see `slowest_ns`. nan: no request was answered."""
    histogram, answered = _histogram(counts)
    if not answered:
        return nan
    remaining = percent * answered / 100  # in this order exact: 56 / 100 * 25 is more than 14
    low = 0
    for index, count in enumerate(histogram):
        high = min(BOUNDS_NS[index], top_ns) if index < len(BOUNDS_NS) else top_ns
        if count and remaining <= count:
            return low + (max(high, low) - low) * remaining / count
        remaining -= count
        low = BOUNDS_NS[min(index, len(BOUNDS_NS) - 1)]
    return float(top_ns)


def distribution_ms(counts: Sequence[int], top_ns: int) -> list[float]:
    """Return milliseconds by `PERCENTS`, or an empty list if no request was answered."""
    if not counts or not _histogram(counts)[1]:
        return []
    return [round(quantile_ns(counts, percent, top_ns) / 1e6, 3) for percent in PERCENTS]


def of_model(counts: Sequence[int], seconds: float, top_ns: int) -> list[float]:
    """Return the `MODEL_COLUMNS` of a period of `seconds`."""
    answered, failed = counts[_SUCCEEDED], sum(failures(counts))
    requests = answered + failed
    executions, ran = counts[_EXECUTIONS], counts[_RAN]
    queue_ns, *compute_ns = counts[_STAGE_NS:WIDTH]
    return [
        requests / seconds,
        100 * failed / requests if requests else nan,
        counts[_SUCCESS_NS] / answered / 1e6 if answered else nan,
        *(quantile_ns(counts, percent, top_ns) / 1e6 for percent in (50, 90, 99)),
        top_ns / 1e6 if answered else nan,
        executions / seconds,
        counts[_INFERENCES] / executions if executions else nan,
        queue_ns / ran / 1e6 if ran else nan,
        sum(compute_ns) / ran / 1e6 if ran else nan,
        sum(counts[_COPIED:_HISTOGRAM]) / seconds,
    ]


def of_all(counts: Sequence[int], seconds: float, top_ns: int) -> list[float]:
    """Return the `ALL_COLUMNS` of a period of `seconds`."""
    return [
        *of_model(counts, seconds, top_ns),
        *(count / seconds for count in counts[_FAILURES:_HISTOGRAM]),
        *counts[_HISTOGRAM:_EXECUTIONS],
    ]


def _histogram(counts: Sequence[int]) -> tuple[Sequence[int], int]:
    histogram = counts[_HISTOGRAM:_EXECUTIONS]
    return histogram, sum(histogram)
