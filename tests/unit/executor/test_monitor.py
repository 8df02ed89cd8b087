"""Numbers that models report about themselves."""

from __future__ import annotations

import pytest

from shmserve.executor import monitor
from shmserve.executor.monitor import Monitor


class Clock:
    """Seconds that go on when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_values_of_a_second_are_told_in_the_next() -> None:
    clock = Clock()
    numbers = Monitor(clock)
    for value in (3, 1, 2):
        numbers.avg("avg", value)
        numbers.max("max", value)
        numbers.min("min", value)
        numbers.inc("inc", value)
        numbers.cdf("cdf", value)
    assert numbers.snapshot()["avg"] == {"kind": "avg", "value": 0.0, "total": 6.0}
    clock.now += 1
    seen = numbers.snapshot()
    assert {name: seen[name]["value"] for name in ("avg", "max", "min", "inc")} == {
        "avg": 2.0,
        "max": 3.0,
        "min": 1.0,
        "inc": 6.0,
    }
    assert seen["cdf"]["value"]["50"] == 2.0
    assert seen["cdf"]["value"]["99.99"] == 3.0
    clock.now += 1
    seen = numbers.snapshot()
    assert (seen["inc"]["value"], seen["inc"]["total"]) == (0.0, 6.0)
    assert seen["cdf"]["value"] == {}


def test_a_second_without_values_between_two_with_is_not_told_as_either() -> None:
    clock = Clock()
    numbers = Monitor(clock)
    numbers.inc("n", 5)
    clock.now += 2
    numbers.inc("n", 7)
    assert numbers.snapshot()["n"]["value"] == 0.0
    clock.now += 1
    assert numbers.snapshot()["n"]["value"] == 7.0


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(monitor, "MAX_NAMES", 2)
    monkeypatch.setattr(monitor, "MAX_SAMPLES", 3)
    clock = Clock()
    numbers = Monitor(clock)
    for name in ("a", "b", "c", "d"):
        numbers.inc(name, 1)
    assert set(numbers.snapshot()) == {"a", "b"}
    assert caplog.text.count("others are dropped") == 1
    other = Monitor(clock)
    for value in range(10):
        other.cdf("x", value)
    clock.now += 1
    assert other.snapshot()["x"]["value"]["99.99"] == 2.0
