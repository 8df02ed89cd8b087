"""The history against the samples given to it, over any pauses, starts and ends."""

from math import isnan, nan

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core.stats.time_series import (
    LEVELS,
    Column,
    Key,
    Sample,
    SavedSeries,
    SeriesKind,
    TimeSeries,
    Track,
)

# One counted column (a rate), one derived from the slowest, and a gauge of each way
KIND = SeriesKind(
    ("rate", "slowest"),
    1,
    lambda counts, seconds, slowest: [counts[0] / seconds, slowest or nan],
    (("mean", "mean"), ("max", "max"), ("min", "min")),
)
KEY = ("k",)

# Steps: seconds until the next sample (mostly 1), the count, a gauge or None; often equal
STEPS = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.just(1), st.integers(1, 200), st.integers(1, 40_000)),
        st.one_of(st.just(0), st.integers(0, 1000)),
        st.one_of(st.none(), st.just(3), st.integers(-5, 5)),
    ),
    min_size=1,
    max_size=150,
)


class Model:
    """Every sample so far: (second, seconds since the last sample, count, gauge)."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int, int | None]] = []

    def columns(self, level: int, number: int) -> dict[str, float | None]:
        size = LEVELS[level].seconds
        mine = [s for s in self.samples if s[0] // size == number]
        seconds = sum(s[1] for s in mine)
        gauges = [s[3] for s in mine if s[3] is not None]
        return {
            "rate": sum(s[2] for s in mine) / seconds if mine else None,
            "slowest": (max(s[2] for s in mine) or None) if mine else None,
            "mean": sum(gauges) / len(gauges) if gauges else None,
            "max": max(gauges) if gauges else None,
            "min": min(gauges) if gauges else None,
        }


def play(history: TimeSeries, steps: list[tuple[int, int, int | None]]) -> Model:
    model, second = Model(), -1
    for pause, count, gauge in steps:
        second += pause
        value = nan if gauge is None else float(gauge)
        sample = Sample([count] if count else (), count, [value] * 3)
        history.add(second, float(pause), {KEY: (KIND, sample)})
        model.samples.append((second, pause, count, gauge))
    return model


def same(found: Column, wanted: list[float | None]) -> bool:
    return len(found) == len(wanted) and all(
        a == b if a is None or b is None else a == pytest.approx(b, abs=6e-4)
        for a, b in zip(found, wanted, strict=True)
    )


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_every_point_of_every_level_is_what_its_seconds_add_up_to(
    steps: list[tuple[int, int, int | None]],
) -> None:
    history = TimeSeries(10)
    model = play(history, steps)
    for level, of in enumerate(LEVELS):
        first, until = history.span(level)
        assert until == (model.samples[-1][0] + 1) // of.seconds
        assert until - first == min(until, of.points)
        columns = history.part(KEY, level)
        numbers = [*range(first, until), *([until] if history.runs(level) else [])]
        for name, column in columns.items():
            wanted = [model.columns(level, number)[name] for number in numbers]
            assert same(column, wanted), (of.name, name)


@given(STEPS, st.integers(0, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_new_continues_what_was_known(
    steps: list[tuple[int, int, int | None]], level: int, data: st.DataObject
) -> None:
    history = TimeSeries(10)
    cut = data.draw(st.integers(1, len(steps)))
    play(history, steps[:cut])
    first, until = history.span(level)
    known = dict(zip(range(first, until), history.part(KEY, level)["rate"], strict=False))
    second = sum(step[0] for step in steps[:cut]) - 1
    for pause, count, _ in steps[cut:]:
        second += pause
        history.add(second, float(pause), {KEY: (KIND, Sample([count], count, [nan] * 3))})
    start, end = history.span(level, until)
    new = history.part(KEY, level, until)["rate"]
    known.update(zip(range(start, end), new, strict=False))
    first, _ = history.span(level)
    whole = history.part(KEY, level)["rate"]
    assert [known.get(number) for number in range(first, end)] == whole[: end - first]


def restored(history: TimeSeries, gap: int, kind: SeriesKind | None = KIND) -> TimeSeries:
    """Restore the saved history in another process, `gap` seconds later."""
    saved = msgspec.msgpack.encode(history.saved(0.0))
    other = TimeSeries(10)
    other.restore(msgspec.msgpack.decode(saved, type=SavedSeries), gap, lambda _: kind)
    return other


@given(STEPS, st.data())
@settings(max_examples=100, deadline=None)
def test_one_that_was_saved_on_the_way_is_the_same(
    steps: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    history = TimeSeries(10)
    cut = data.draw(st.integers(1, len(steps)))
    play(history, steps[:cut])
    pause, count, _ = data.draw(STEPS)[0]
    other = restored(history, pause - 1)
    assert other.next == history.next + pause - 1
    days = (other.next - history.tracks[KEY].touched) // LEVELS[-1].seconds
    assert other.tracks or days >= LEVELS[-1].points
    if not other.tracks:
        return
    later = {KEY: (KIND, Sample([count], count, [nan] * 3))}
    for each in (history, other):
        each.add(other.next, 1.0, later)  # type: ignore[arg-type]
    for level in range(len(LEVELS)):
        assert other.span(level) == history.span(level)
        assert other.part(KEY, level) == history.part(KEY, level)


def test_what_another_version_saved_otherwise_is_left_out() -> None:
    history = TimeSeries(10)
    history.add(0, 1.0, {KEY: (KIND, Sample([7], 1, [2.0]))})
    assert set(restored(history, 0).tracks) == {KEY}
    for kind in (None, SeriesKind(gauges=(("mean", "mean"),)), SeriesKind(KIND.columns, 2)):
        assert restored(history, 0, kind).tracks == {}


def test_one_who_comes_later_has_no_values_before() -> None:
    history = TimeSeries(10)
    for second in range(3):
        history.add(second, 1.0, {})
    history.add(3, 1.0, {KEY: (KIND, Sample([7], 1))})
    assert history.part(KEY, 0)["rate"] == [None, None, None, 7.0]
    assert history.part(KEY, 1)["rate"] == [7.0]  # for the one second in which the process existed


def test_who_is_given_nothing_counts_nothing() -> None:
    history = TimeSeries(10)
    history.add(0, 1.0, {KEY: (KIND, Sample([7], 1, [2.0]))})
    history.add(1, 1.0, {})
    assert history.part(KEY, 0)["rate"] == [7.0, 0.0]
    assert history.part(KEY, 0)["mean"] == [2.0, None]


def test_a_second_that_was_sampled_is_not_sampled_again() -> None:
    history = TimeSeries(10)
    history.add(5, 1.0, {KEY: (KIND, Sample([1]))})
    history.add(5, 1.0, {KEY: (KIND, Sample([9]))})
    assert history.part(KEY, 0)["rate"][-1] == 1.0


def test_nobody_with_values_is_displaced_and_who_has_none_is() -> None:
    history = TimeSeries(2)
    keys: list[Key] = [("a",), ("b",), ("c",)]
    busy = Sample([1])
    history.add(0, 1.0, {keys[0]: (KIND, busy), keys[1]: (KIND, busy)})
    history.add(10, 1.0, {keys[1]: (KIND, busy), keys[2]: (KIND, busy)})
    assert set(history.tracks) == {("a",), ("b",)}
    history.add(4000, 1.0, {keys[1]: (KIND, busy), keys[2]: (KIND, busy)})
    assert set(history.tracks) == {("b",), ("c",)}
    assert history.part(("a",), 0) == {}


def test_a_track_goes_with_its_last_value() -> None:
    history = TimeSeries(10)
    gone, stays = ("gone",), ("stays",)
    sample = KIND, Sample([7], 1, [2.0])
    history.add(0, 1.0, {gone: sample, stays: sample})
    day, days = LEVELS[-1].seconds, LEVELS[-1].points
    for number in range(1, days + 1):
        history.add(number * day, 1.0, {stays: sample})
    assert set(history.tracks) == {gone, stays}
    assert history.part(gone, 3)["mean"][0] == 2.0
    assert set(restored(history, day - 2).tracks) == {gone, stays}
    assert set(restored(history, day - 1).tracks) == {stays}
    history.add((days + 1) * day - 1, 1.0, {stays: sample})
    assert set(history.tracks) == {stays}
    assert set(restored(history, 2 * days * day).tracks) == set()


def test_a_track_is_of_one_size_for_good() -> None:
    track = Track(KIND, 0)
    rings = [len(ring) for ring in track._rings]
    assert rings == [level.points * 5 for level in LEVELS]
    assert not any(isnan(value) is False for ring in track._rings for value in ring)
