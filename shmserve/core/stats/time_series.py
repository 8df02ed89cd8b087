"""Time series: the latest 60 seconds, 60 minutes, 24 hours and 30 days. Pure, and bounded.

A *track* is a group of series that are written together. Once a second each track is given a
`Sample`. Longer periods add up the same samples and become numbers by the same rule as a second
does, so a minute's average is that of its requests, and its maximum that of its slowest request.
Periods have numbers that count from the start of the history. A second without a sample has no
values. `SavedSeries` holds all of it for a successor.

Bounds: 21 KiB of numbers a model version, 256 model versions, 512 reported values, 64 GPUs. A
browser asks only for what is new (`since`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from shmserve.core.stats.counter_pages import add_each

Derive = Callable[[Sequence[int], float, int], list[float]]
Column = list[float | None]
Key = tuple[str | int, ...]


class SeriesLevel(NamedTuple):
    """A resolution: so many seconds a point, so many points are kept."""

    name: str
    seconds: int
    points: int


LEVELS = (
    SeriesLevel("second", 1, 60),
    SeriesLevel("minute", 60, 60),
    SeriesLevel("hour", 3600, 24),
    SeriesLevel("day", 86400, 30),
)


class SeriesKind(Struct, frozen=True):
    """What a track is made of: columns that `derive` makes of counts, then gauges.

    `derive`: of a period's counts, its seconds and its slowest; no counts are the same columns
    in every period. `gauges`: name and how the seconds of a period become one: mean, max or min.
    """

    columns: tuple[str, ...] = ()
    width: int = 0
    derive: Derive | None = None
    gauges: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, *(name for name, _ in self.gauges))

    def derived(self, counts: Sequence[int], seconds: float, slowest: int) -> list[float]:
        """The columns that are made of counts, rounded."""
        made = self.derive(counts, seconds, slowest) if self.derive is not None else []
        return [round(value, 3) for value in made]


def means(*gauges: str) -> SeriesKind:
    """Of gauges alone, whose periods have the mean of their seconds."""
    return SeriesKind(gauges=tuple((name, "mean") for name in gauges))


class Sample(Struct):
    """One second of a track. `counts` empty: nothing was counted; gauges nan or missing: none."""

    counts: Sequence[int] = ()
    slowest: int = 0
    gauges: Sequence[float] = ()


_NOTHING = Sample()
_DISPLACED_S = 3600


class Period(Struct, array_like=True):
    """What a period that is not over has so far."""

    counts: list[int]
    gauges: list[float]
    weights: list[int]
    seconds: float = 0.0
    slowest: int = 0
    counted: bool = False

    @classmethod
    def of(cls, kind: SeriesKind) -> Period:
        return cls([0] * kind.width, [nan] * len(kind.gauges), [0] * len(kind.gauges))

    def fits(self, kind: SeriesKind) -> bool:
        """Whether it can be one of this kind's."""
        gauges = len(self.gauges) == len(self.weights) == len(kind.gauges)
        return gauges and len(self.counts) == kind.width

    def add(self, kind: SeriesKind, sample: Sample, seconds: float, times: int = 1) -> None:
        """The sample of so many seconds, which came as often; one with counts comes once."""
        self.seconds += seconds
        self.slowest = max(self.slowest, sample.slowest)
        if sample.counts:
            self.counted = True
            add_each(self.counts, sample.counts)
        for index, (value, (_, way)) in enumerate(zip(sample.gauges, kind.gauges, strict=False)):
            if isnan(value):
                continue
            known, self.weights[index] = self.weights[index], self.weights[index] + times
            if way == "mean":
                self.gauges[index] = (self.gauges[index] if known else 0.0) + value * times
            elif known:
                self.gauges[index] = (max if way == "max" else min)(self.gauges[index], value)
            else:
                self.gauges[index] = value

    def values(self, kind: SeriesKind, nothing: list[float]) -> list[float]:
        """`nothing`: the columns of a period without counts."""
        counted = self.counted
        derived = kind.derived(self.counts, self.seconds, self.slowest) if counted else nothing
        gauges = (
            round(value / weight if way == "mean" and weight else value, 3)
            for value, weight, (_, way) in zip(self.gauges, self.weights, kind.gauges, strict=True)
        )
        return [*derived, *gauges]


class SavedTrack(Struct, array_like=True, frozen=True):
    """A track. `names`: its columns; `rings`: by level, the bytes of its float64 values."""

    key: Key
    names: tuple[str, ...]
    touched: int
    rings: tuple[bytes, ...]
    running: tuple[Period, ...]

    def fits(self, kind: SeriesKind) -> bool:
        """Whether another program, which may have been of another version, wrote such a track."""
        sizes = [level.points * len(kind.names) * 8 for level in LEVELS]
        return (
            self.names == kind.names
            and [len(ring) for ring in self.rings] == sizes
            and len(self.running) == len(LEVELS)
            and all(period.fits(kind) for period in self.running)
        )


class SavedSeries(Struct, array_like=True, frozen=True):
    """All tracks. `ended`: by the wall clock, in seconds; `next`: the second that began then."""

    ended: float
    next: Annotated[int, Meta(ge=0, le=1 << 48)]
    seconds: tuple[float, ...]
    tracks: tuple[SavedTrack, ...]


class Track:
    """A group of series. `touched`: the last second in which it had any value."""

    def __init__(self, kind: SeriesKind, second: int, saved: SavedTrack | None = None) -> None:
        self.kind = kind
        self.touched = second
        self._width = len(kind.names)
        self._nothing = kind.derived([0] * kind.width, 1.0, 0)
        if saved is not None:
            self._rings = [array("d", ring) for ring in saved.rings]
            self._running = list(saved.running)
        else:
            self._rings = [array("d", [nan]) * (level.points * self._width) for level in LEVELS]
            # The first stays empty: `_second` is all
            self._running = [Period.of(kind) for _ in LEVELS]
        self._second: list[float] | None = None  # what the last second has become
        self._sample, self._times, self._seconds = _NOTHING, 0, 0.0  # not in the periods yet
        self._values: list[float] = []  # of a second of it

    def saved(self, key: Key) -> SavedTrack:
        self._settle()
        rings = tuple(ring.tobytes() for ring in self._rings)
        return SavedTrack(key, self.kind.names, self.touched, rings, tuple(self._running))

    @classmethod
    def restored(cls, saved: SavedTrack, kind: SeriesKind) -> Track:
        """One of a kind that `fits`."""
        return cls(kind, saved.touched, saved)

    def add(self, sample: Sample, number: int, seconds: float) -> None:
        """One more second. Where nothing happens it is as the one before: they are added at once
        when that ends."""
        if sample.counts or not all(map(isnan, sample.gauges)):
            self.touched = number
        if not self._times or sample != self._sample:
            self._settle()
            self._sample = sample
            second = Period.of(self.kind)
            second.add(self.kind, sample, seconds)
            self._values = second.values(self.kind, self._nothing)
        self._second = self._values
        self._times += 1
        self._seconds += seconds
        if sample.counts:
            self._settle()

    def finish(self, level: int, number: int) -> None:
        """The period that runs is over; it was this one."""
        if not level:
            values, self._second = self._second, None
        else:
            self._settle()
            period, self._running[level] = self._running[level], Period.of(self.kind)
            values = period.values(self.kind, self._nothing) if period.seconds else None
        self._put(level, number, values or [nan] * self._width)

    def skip(self, level: int, number: int) -> None:
        """A period that nobody sampled."""
        self._put(level, number, [nan] * self._width)

    def part(self, level: int, first: int, until: int, running: bool) -> dict[str, Column]:
        """By column: the periods from `first` up to `until`, then perhaps the one that runs."""
        self._settle()
        points, ring = LEVELS[level].points, self._rings[level]
        last, more = self._running[level], [nan] * self._width
        if running and last.seconds:
            more = last.values(self.kind, self._nothing)
        columns: dict[str, Column] = {}
        for index, name in enumerate(self.kind.names):
            cells = [ring[number % points * self._width + index] for number in range(first, until)]
            if running:
                cells.append(more[index])
            columns[name] = [None if isnan(value) else value for value in cells]
        return columns

    def _settle(self) -> None:
        if self._times:
            for period in self._running[1:]:
                period.add(self.kind, self._sample, self._seconds, self._times)
            self._times, self._seconds = 0, 0.0

    def _put(self, level: int, number: int, values: Sequence[float]) -> None:
        at = number % LEVELS[level].points * self._width
        self._rings[level][at : at + self._width] = array("d", values)


class TimeSeries:
    """All tracks by key. `limit`: how many. A new one takes the place of the one that has had
    no values for longest, but of none that had any within the last hour. One that has none left
    in any period goes when the longest period ends."""

    def __init__(self, limit: int) -> None:
        self.tracks: dict[Key, Track] = {}
        self.next = 0  # the second that comes
        self._limit = limit
        self._begun = [0 for _ in LEVELS]  # the number of the period that runs
        self._seconds = [0.0 for _ in LEVELS]  # that it has so far

    def add(
        self, second: int, seconds: float, samples: Mapping[Key, tuple[SeriesKind, Sample]]
    ) -> None:
        """The given second (later than all before) is over; `seconds`: since the last sample."""
        if second < self.next:
            return
        longest = self._begun[-1]
        for key, (kind, _) in samples.items():
            if key not in self.tracks and self._room(second):
                self.tracks[key] = Track(kind, second)
        for level in range(len(LEVELS)):
            self._catch_up(level, second)
        for key, track in self.tracks.items():
            _, sample = samples.get(key, (None, _NOTHING))
            track.add(sample, second, seconds)
        for level in range(len(LEVELS)):
            self._seconds[level] += seconds
            self._catch_up(level, second + 1)
        self.next = second + 1
        if self._begun[-1] > longest:
            for key in self.tracks.keys() - samples.keys():
                if _over(self.tracks[key].touched, self.next):
                    del self.tracks[key]

    def saved(self, ended: float) -> SavedSeries:
        """All of it, to be encoded before anything is added. `ended`: the wall clock's time at
        which the second that comes begins."""
        tracks = tuple(track.saved(key) for key, track in self.tracks.items())
        return SavedSeries(ended, self.next, tuple(self._seconds), tracks)

    def restore(
        self, saved: SavedSeries, gap: int, kind_of: Callable[[Key], SeriesKind | None]
    ) -> None:
        """Go on with what was saved, `gap` seconds later, which have no values.

        Here is nothing yet. Tracks that are not of the kind that they should be are left out,
        and those that have no values left.
        """
        if len(saved.seconds) != len(LEVELS):
            return
        for track in saved.tracks[: self._limit]:
            kind = kind_of(track.key)
            gone = _over(track.touched, saved.next + gap)
            if kind is not None and track.fits(kind) and not gone:
                self.tracks[track.key] = Track.restored(track, kind)
        self._begun = [saved.next // level.seconds for level in LEVELS]
        self._seconds = list(saved.seconds)
        self.next = saved.next + gap
        for level in range(len(LEVELS)):
            self._catch_up(level, self.next)

    def span(self, level: int, since: int = 0) -> tuple[int, int]:
        """Numbers of the first and after the last period that is kept, not before `since`."""
        until = self._begun[level]
        return min(until, max(since, until - LEVELS[level].points, 0)), until

    def part(self, key: Key, level: int, since: int = 0) -> dict[str, Column]:
        """A track's columns over `span`; of longer periods also the one that runs."""
        track = self.tracks.get(key)
        if track is None:
            return {}
        first, until = self.span(level, since)
        return track.part(level, first, until, running=self.runs(level))

    def runs(self, level: int) -> bool:
        """Whether a period of this level has begun and is not over."""
        return self._seconds[level] > 0

    def _catch_up(self, level: int, second: int) -> None:
        """End all periods that are over when this second begins."""
        now = second // LEVELS[level].seconds
        number = self._begun[level]
        if now <= number:
            return
        for track in self.tracks.values():
            track.finish(level, number)
            for skipped in range(max(number + 1, now - LEVELS[level].points), now):
                track.skip(level, skipped)
        self._begun[level] = now
        self._seconds[level] = 0.0

    def _room(self, second: int) -> bool:
        if len(self.tracks) < self._limit:
            return True
        oldest = min(self.tracks, key=lambda key: self.tracks[key].touched)
        if self.tracks[oldest].touched > second - _DISPLACED_S:
            return False
        del self.tracks[oldest]
        return True


def _over(touched: int, second: int) -> bool:
    """Whether no period that is kept when `second` begins has this second."""
    _, seconds, points = LEVELS[-1]
    return touched // seconds < second // seconds - points
