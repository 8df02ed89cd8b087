"""Rates, times and percentages made of counters."""

from bisect import bisect_left
from math import isnan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.core.stats import aggregation
from shmserve.core.stats.counter_pages import BOUNDS_NS, BUCKETS
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import Reason, RequestCounts

MS = 1_000_000
DURATIONS = st.lists(st.integers(1, 30_000 * MS), min_size=1, max_size=60)


def bucket(ns: int) -> int:
    return bisect_left(BOUNDS_NS, ns)


def counted(*durations_ns: int, **more: int) -> list[int]:
    """Return a frontend's counts after requests with the given durations."""
    counts = RequestCounts(len(durations_ns), sum(durations_ns))
    for ns in durations_ns:
        counts.buckets[bucket(ns)] += 1
    for reason, count in more.items():
        counts.failures[Reason[reason]] = count
    return aggregation.from_requests(counts)


def named(values: list[float], columns: tuple[str, ...]) -> dict[str, float]:
    return dict(zip(columns, values, strict=True))


def test_the_slowest_request() -> None:
    assert aggregation.slowest_ns(counted(3_141_592)) == 3_141_592, "of one it is its very time"
    assert aggregation.slowest_ns(counted(*[4 * MS] * 50)) == 5 * MS, "the bound of its bucket"
    beyond = counted(1 * MS, 60_000 * MS)  # beyond all bounds, the sum tells
    assert aggregation.slowest_ns(beyond) <= 60_001 * MS


def test_without_requests_there_is_no_slowest() -> None:
    assert aggregation.slowest_ns(counted()) == 0
    assert aggregation.distribution_ms(counted(), 0) == []
    assert isnan(aggregation.quantile_ns(counted(), 50, 0))


@given(DURATIONS)
def test_the_slowest_is_never_told_too_fast_nor_beyond_its_bucket(durations: list[int]) -> None:
    top = aggregation.slowest_ns(counted(*durations))
    assert max(durations) <= top
    index = bucket(max(durations))
    assert top <= (BOUNDS_NS[index] if index < len(BOUNDS_NS) else sum(durations))


@given(DURATIONS)
@example([1] * 14 + [100_001] * 11)
def test_quantiles_grow_lie_in_their_bucket_and_end_at_the_slowest(durations: list[int]) -> None:
    counts = counted(*durations)
    top = aggregation.slowest_ns(counts)
    found = [aggregation.quantile_ns(counts, percent, top) for percent in range(1, 101)]
    assert found == sorted(found)
    assert found[-1] <= top * (1 + 1e-12)
    ordered = sorted(durations)
    for percent, ns in enumerate(found, 1):
        true = ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
        index = bucket(true)
        low = BOUNDS_NS[index - 1] if index else 0
        high = BOUNDS_NS[index] if index < len(BOUNDS_NS) else top
        assert low <= ns <= max(high, low) * (1 + 1e-12)


def test_a_period_as_people_see_it() -> None:
    counts = counted(2 * MS, 4 * MS, MODEL=1, BAD_REQUEST=1)
    runs = ExecutorCounts(0, 6, 3, 3, [3 * MS, 0, 6 * MS, 0])
    whole = [a + b for a, b in zip(counts, aggregation.from_runs(runs), strict=True)]
    row = named(
        aggregation.of_model(whole, 2.0, aggregation.slowest_ns(whole)), aggregation.MODEL_COLUMNS
    )
    assert row["requests"] == 2.0  # refused ones are requests, too
    assert row["failed"] == 50.0  # and failures
    assert row["latency_avg"] == 3.0
    assert row["latency_max"] == pytest.approx(5.0)
    assert (row["executions"], row["batch"]) == (1.5, 2.0)
    assert (row["queue"], row["compute"]) == (1.0, 2.0)


def test_of_nothing_there_are_rates_but_no_times() -> None:
    row = named(aggregation.of_all([0] * aggregation.WIDTH, 1.0, 0), aggregation.ALL_COLUMNS)
    assert row["requests"] == row["copied"] == row["failed_model"] == 0.0
    for name in ("failed", "latency_avg", "latency_p50", "latency_max", "batch", "queue"):
        assert isnan(row[name]), name


def test_reasons_stages_and_buckets_are_told_apart() -> None:
    counts = RequestCounts(3, 9, 0, [*range(len(Reason))], [10, 20, 30, 40], [*range(BUCKETS)])
    row = named(
        aggregation.of_all(aggregation.from_requests(counts), 2.0, 5), aggregation.ALL_COLUMNS
    )
    assert row["failed_internal"] == Reason.INTERNAL / 2
    assert (row["copied_in"], row["copied_device"], row["copied"]) == (5.0, 20.0, 50.0)
    assert row["bucket_7"] == 7.0


def test_growth_is_never_negative_and_percents_are_as_many_as_grps_numbers() -> None:
    assert aggregation.growth([5, 1, 3], [2, 4, 3]) == [3, 0, 0]
    assert len(aggregation.PERCENTS) == 20
    assert len(aggregation.distribution_ms(counted(MS), MS)) == 20
