"""Values that models report about themselves."""

from __future__ import annotations

from shmserve.executor import custom_metrics, reported_values
from shmserve.executor.custom_metrics import CustomMetrics
from shmserve.executor.monitor import app_monitor
from shmserve.executor.reported_values import ReportedValues


class Clock:
    """Clock in seconds that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_values_of_a_second_are_told_in_the_next() -> None:
    clock = Clock()
    numbers = ReportedValues(clock)
    for value in (3, 1, 2):
        for kind in ("avg", "max", "min", "inc", "cdf"):
            numbers.add(kind, kind, value)
    assert numbers.snapshot()["avg"] == {"kind": "avg", "value": 0.0, "total": 6.0}
    clock.now += 1
    seen = numbers.snapshot()
    assert [seen[name]["value"] for name in ("avg", "max", "min", "inc")] == [2.0, 3.0, 1.0, 6.0]
    assert seen["cdf"]["value"]["50"] == 2.0
    assert seen["cdf"]["value"]["99.99"] == 3.0
    clock.now += 1
    seen = numbers.snapshot()
    assert (seen["inc"]["value"], seen["inc"]["total"]) == (0.0, 6.0)
    assert seen["cdf"]["value"] == {}


def test_a_second_without_values_between_two_with_is_not_told_as_either() -> None:
    clock = Clock()
    numbers = ReportedValues(clock)
    numbers.add("inc", "n", 5)
    clock.now += 2
    numbers.add("inc", "n", 7)
    assert numbers.snapshot()["n"]["value"] == 0.0
    clock.now += 1
    assert numbers.snapshot()["n"]["value"] == 7.0


def test_it_is_bounded(monkeypatch, caplog) -> None:
    monkeypatch.setattr(reported_values, "MAX_NAMES", 2)
    monkeypatch.setattr(reported_values, "MAX_SAMPLES", 3)
    clock = Clock()
    numbers = ReportedValues(clock)
    for name in ("a", "b", "c", "d"):
        numbers.add("inc", name, 1)
    assert set(numbers.snapshot()) == {"a", "b"}
    assert caplog.text.count("others are dropped") == 1
    other = ReportedValues(clock)
    for value in range(10):
        other.add("cdf", "x", value)
    clock.now += 1
    assert other.snapshot()["x"]["value"]["99.99"] == 2.0


def test_a_monitor_reports_to_the_registry_of_the_models_metrics(monkeypatch) -> None:
    monkeypatch.setattr(custom_metrics, "registry", CustomMetrics())
    for value in (1, 2):
        app_monitor.avg("avg", value)
        app_monitor.inc("inc", value)
    app_monitor.cdf("inc", 5)  # a name keeps its kind
    seen = custom_metrics.registry.values.snapshot()
    assert {name: (entry["kind"], entry["total"]) for name, entry in seen.items()} == {
        "avg": ("avg", 3.0),
        "inc": ("inc", 8.0),
    }


def test_a_forked_process_does_not_count_in_its_executors_words() -> None:
    words = memoryview(bytearray(16)).cast("Q")
    values = ReportedValues(Clock())
    values.publish(words, 1)
    values.add("inc", "n", 1)
    values.forked()
    values.add("inc", "n", 1)
    assert list(words) == [0, 1]
