"""Values reported by models: permitted reports of an executor, and the sum of several instances."""

from math import inf, isnan, nan
from typing import Any

import pytest

from shmserve.core.stats import model_metrics
from shmserve.core.stats.aggregation import PERCENTS
from shmserve.core.stats.model_metrics import ModelMetrics

FLAT = [1.0] * len(PERCENTS)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        ["avg", 1],
        ["avg", 1, 2, 3],
        ["median", 1, 2.0],
        [7, 1, 2.0],
        [["avg"], 1, 2.0],
        ["avg", -1, 2.0],
        ["avg", "1", 2.0],
        ["avg", 1 << 60, 2.0],
        ["avg", 1, nan],
        ["avg", 1, inf],
        ["avg", 1, 10**400],
        ["avg", 1, "2"],
        ["cdf", 1, 2.0],
        ["cdf", 1, FLAT[1:]],
        ["cdf", 1, [*FLAT[1:], nan]],
        ["cdf", 0, FLAT],
    ],
)
def test_nonsense_is_left_out(entry: Any) -> None:
    assert model_metrics.parse({"bad": entry, "good": ["inc", 2, 3]}) == {
        "good": ModelMetrics("inc", 3.0, (), 2)
    }


@pytest.mark.parametrize("data", [None, [], "x", {1: ["inc", 1, 1]}, {"": ["inc", 1, 1]}])
def test_only_names_with_entries_count(data: Any) -> None:
    assert model_metrics.parse(data) == {}


def test_names_are_bounded_in_length_and_number() -> None:
    assert model_metrics.parse({"x" * 129: ["inc", 1, 1]}) == {}
    assert len(model_metrics.parse({str(n): ["inc", 1, 1] for n in range(1000)})) == 256


@pytest.mark.parametrize(
    ("kind", "value"), [("avg", 2.5), ("max", 4.0), ("min", 2.0), ("inc", 6.0)]
)
def test_instances_are_put_together_as_their_kind_says(kind: str, value: float) -> None:
    silent = ModelMetrics(kind, 0.0, (), 0)
    one = model_metrics.merged(
        [ModelMetrics(kind, 2.0, (), 3), ModelMetrics(kind, 4.0, (), 1), silent]
    )
    assert (one.value, one.count) == (value, 4)


def test_a_second_without_values_has_none_but_a_sum() -> None:
    assert isnan(model_metrics.gauges(model_metrics.merged([ModelMetrics("avg", 0.0, (), 0)]))[0])
    assert model_metrics.gauges(model_metrics.merged([ModelMetrics("inc", 0.0, (), 0)])) == [0.0]
    assert all(map(isnan, model_metrics.gauges(model_metrics.merged([ModelMetrics("cdf")]))))


def test_one_distribution_stays_as_it_is() -> None:
    points = [float(n) for n in range(len(PERCENTS))]
    one = model_metrics.merged([ModelMetrics("cdf", nan, points, 9), ModelMetrics("cdf")])
    assert one.points == points
    middle = (PERCENTS.index(50), PERCENTS.index(90), PERCENTS.index(99))
    assert model_metrics.gauges(one) == [points[at] for at in middle]


def test_distributions_mix_by_their_weight() -> None:
    low = ModelMetrics("cdf", nan, [1.0] * len(PERCENTS), 30)
    high = ModelMetrics("cdf", nan, [9.0] * len(PERCENTS), 10)
    points = model_metrics.merged([low, high]).points
    assert len(points) == len(PERCENTS)
    for percent, value in zip(PERCENTS, points, strict=True):
        assert value == (1.0 if percent <= 70 else 9.0), percent


def test_who_reports_another_kind_under_the_same_name_is_left_out() -> None:
    one = model_metrics.merged([ModelMetrics("max", 3.0, (), 1), ModelMetrics("min", 1.0, (), 1)])
    assert (one.kind, one.value) == ("max", 3.0)
