"""Models' own metrics: permitted reports of an executor, and the sum of many instances."""

from math import inf, nan

import pytest

from shmserve.core.stats.custom_metrics import (
    MAX_BUCKETS,
    MAX_LABELS,
    Family,
    InstanceMetrics,
    MetricKind,
    Series,
    merged,
    with_values,
)

COUNTER, GAUGE, HISTOGRAM = MetricKind
A, B = (("a", "1"),), (("b", "2"), ("a", "1"))
MANY = tuple(map(float, range(MAX_BUCKETS + 1)))
LABELS = tuple((f"l{number}", "") for number in range(MAX_LABELS + 1))


def part(instance: str, *families: Family) -> InstanceMetrics:
    return InstanceMetrics("m", "1", instance, families)


def told(*parts: InstanceMetrics, several: bool = False) -> list[Family]:
    return merged((each, several) for each in parts)


def test_values_belong_to_the_series_in_their_order() -> None:
    families = (
        Family("n", "of things", COUNTER, (Series(A), Series(B))),
        Family("h", "", HISTOGRAM, (Series((), (0.5, 2.0)), Series(A, ()))),
        Family("nothing", "", GAUGE),
    )
    whole = with_values(families, [1, 2, 10, 11, 12, 13, 20, 21])
    assert [series.values for series in whole[0].series] == [(1,), (2,)]
    assert [series.values for series in whole[1].series] == [(10, 11, 12, 13), (20, 21)]


@pytest.mark.parametrize(
    ("families", "values"),
    [
        ([Family("n", "", COUNTER, (Series(A),))], []),
        ([Family("n", "", COUNTER, (Series(A),))], [1, 2]),
        ([Family("n", "", COUNTER), Family("n", "", GAUGE)], []),
        ([Family("n", "", COUNTER, (Series(A), Series(A)))], [1, 2]),
        ([Family("a b", "", COUNTER, (Series(A),))], [1]),
        ([Family("n\n", "", COUNTER, (Series(A),))], [1]),
        ([Family("", "", COUNTER, (Series(A),))], [1]),
        ([Family("shmserve_x", "", COUNTER, (Series(A),))], [1]),
        ([Family("n", "", COUNTER, (Series((("a b", "x"),)),))], [1]),
        ([Family("n", "", COUNTER, (Series((("__a", "x"),)),))], [1]),
        ([Family("n", "", COUNTER, (Series((("a", "x"), ("a", "y"))),))], [1]),
        ([Family("n", "", HISTOGRAM, (Series((("le", "x"),), ()),))], [1, 2]),
        ([Family("n", "", HISTOGRAM, (Series((), (2.0, 1.0)),))], [1, 2, 3, 4]),
        ([Family("n", "", HISTOGRAM, (Series((), (1.0, 1.0)),))], [1, 2, 3, 4]),
        ([Family("n", "", HISTOGRAM, (Series((), (nan,)),))], [1, 2, 3]),
        ([Family("n", "", HISTOGRAM, (Series((), (inf,)),))], [1, 2, 3]),
        ([Family("n", "", HISTOGRAM, (Series((), MANY),))], [0] * (len(MANY) + 2)),
        ([Family("n", "", COUNTER, (Series(LABELS),))], [1]),
    ],
)
def test_what_makes_no_sense_is_no_metric(families: list[Family], values: list[float]) -> None:
    assert with_values(families, values) is None


def test_counters_and_histograms_of_all_instances_are_added_up() -> None:
    bounds = (1.0, 2.0)
    first = part(
        "m/1/0",
        Family("n", "first", COUNTER, (Series(B, (), (1,)), Series((), (), (5,)))),
        Family("h", "", HISTOGRAM, (Series(A, bounds, (1, 2, 3, 4.5)),)),
    )
    second = part(
        "m/1/1",
        Family("h", "", HISTOGRAM, (Series(A, bounds, (1, 0, 0, 0.5)),)),
        Family("n", "second", COUNTER, (Series(tuple(reversed(B)), (), (2,)),)),
    )
    histogram, counter = told(first, second)
    assert histogram.series == (Series(A, bounds, (2, 2, 3, 5)),)
    assert counter.help == "first"
    assert [series.values for series in counter.series] == [(5,), (3,)]
    assert counter.series[1].labels == (("a", "1"), ("b", "2"))


def test_gauges_have_their_instance_where_there_are_several() -> None:
    one = part("m/1/0", Family("g", "", GAUGE, (Series(A, (), (1,)),)))
    two = part("m/1/1", Family("g", "", GAUGE, (Series(A, (), (2,)), Series((), (), (3,)))))
    (alone,) = told(one)
    assert alone.series == (Series(A, (), (1,)),)
    (apart,) = told(one, several=True)
    assert apart.series == (Series((*A, ("instance", "m/1/0")), (), (1,)),)
    (shared,) = told(one, two)
    assert shared.series == (
        Series((), (), (3,)),
        Series((*A, ("instance", "m/1/0")), (), (1,)),
        Series((*A, ("instance", "m/1/1")), (), (2,)),
    )


def test_a_label_of_the_model_is_never_said_twice() -> None:
    own = (("instance", "mine"),)
    (family,) = told(part("m/1/0", Family("g", "", GAUGE, (Series(own, (), (1,)),))), several=True)
    assert family.series[0].labels == (*own, ("shmserve_instance", "m/1/0"))


def test_a_gauge_of_an_instance_that_is_replaced_is_told_once() -> None:
    old, new = (part("m/1/0", Family("g", "", GAUGE, (Series(A, (), (n,)),))) for n in (1.0, 2.0))
    (family,) = told(old, new)
    assert family.series == (Series(A, (), (2.0,)),)


def test_what_contradicts_those_before_is_left_out() -> None:
    first = part(
        "a/1/0",
        Family("n", "", COUNTER, (Series(A, (), (1,)),)),
        Family("h", "", HISTOGRAM, (Series(A, (1.0,), (1, 1, 1)),)),
    )
    second = part(
        "b/1/0",
        Family("n", "", GAUGE, (Series(A, (), (7,)),)),
        Family("h", "", HISTOGRAM, (Series(A, (2.0,), (9, 9, 9)), Series(B, (2.0,), (1, 2, 3)))),
    )
    histogram, counter = told(first, second)
    assert (counter.kind, counter.series) == (COUNTER, (Series(A, (), (1,)),))
    assert [series.values for series in histogram.series] == [(1, 1, 1), (1, 2, 3)]
