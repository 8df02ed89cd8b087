"""Time series: the latest 60 seconds, 60 minutes, 24 hours and 30 days. Pure, and bounded.

A *track* is a group of series written together. Each track receives a `Sample` once a second.
Longer periods add up the samples and become numbers by the same rule as a second. So a minute's
average covers all its requests, and its maximum is the slowest request. Periods are numbered from
the start of the history. A second without a sample has no values. `SavedSeries` holds the whole
history for a successor.

Bounds: 21 KiB of numbers per model version, 256 model versions, 512 reported values, 64 GPUs. A
browser requests only new periods (`since`).
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
    """Resolution of a history: seconds per point, and number of kept points."""

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
    """Columns of a track: columns derived from counts, then gauges.

    Attributes:
        columns: names of the derived columns.
        width: number of counts.
        derive: function from a period's counts, seconds and slowest time to the derived columns.
            Without counts the columns must be equal for every period.
        gauges: name, and rule for combining the seconds of a period: mean, max or min.
    """

    columns: tuple[str, ...] = ()
    width: int = 0
    derive: Derive | None = None
    gauges: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, *(name for name, _ in self.gauges))

    def derived(self, counts: Sequence[int], seconds: float, slowest: int) -> list[float]:
        """Return the columns derived from counts, rounded."""
        values = self.derive(counts, seconds, slowest) if self.derive is not None else []
        return [round(value, 3) for value in values]


def means(*gauges: str) -> SeriesKind:
    """Return a kind of gauges only, combined by mean."""
    return SeriesKind(gauges=tuple((name, "mean") for name in gauges))


class Sample(Struct):
    """Values of a track for one second. `counts` empty: nothing was counted. Gauges nan or
    missing: no value."""

    counts: Sequence[int] = ()
    slowest: int = 0
    gauges: Sequence[float] = ()


_NOTHING = Sample()
_DISPLACED_S = 3600


class Period(Struct, array_like=True):
    """Sums of an unfinished period."""

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
        """Return True if the sums have the sizes of this kind."""
        gauges = len(self.gauges) == len(self.weights) == len(kind.gauges)
        return gauges and len(self.counts) == kind.width

    def add(self, kind: SeriesKind, sample: Sample, seconds: float, times: int = 1) -> None:
        """Add a sample repeated `times` times, in `seconds` altogether. A sample with counts is
        never repeated."""
        self.seconds += seconds
        self.slowest = max(self.slowest, sample.slowest)
        if sample.counts:
            self.counted = True
            add_each(self.counts, sample.counts)
        for index, (value, (_, way)) in enumerate(zip(sample.gauges, kind.gauges, strict=False)):
            if isnan(value):
                continue
            weight, self.weights[index] = self.weights[index], self.weights[index] + times
            if way == "mean":
                self.gauges[index] = (self.gauges[index] if weight else 0.0) + value * times
            elif weight:
                self.gauges[index] = (max if way == "max" else min)(self.gauges[index], value)
            else:
                self.gauges[index] = value

    def values(self, kind: SeriesKind, nothing: list[float]) -> list[float]:
        """Return the columns of the period. `nothing`: derived columns of a period without
        counts."""
        counted = self.counted
        derived = kind.derived(self.counts, self.seconds, self.slowest) if counted else nothing
        gauges = (
            round(value / weight if way == "mean" and weight else value, 3)
            for value, weight, (_, way) in zip(self.gauges, self.weights, kind.gauges, strict=True)
        )
        return [*derived, *gauges]


class SavedTrack(Struct, array_like=True, frozen=True):
    """Saved track. `names`: column names; `rings`: by level, the bytes of the float64 values."""

    key: Key
    names: tuple[str, ...]
    touched: int
    rings: tuple[bytes, ...]
    running: tuple[Period, ...]

    def fits(self, kind: SeriesKind) -> bool:
        """Return True if the track has this kind. Another version of the program may have written
        the track."""
        sizes = [level.points * len(kind.names) * 8 for level in LEVELS]
        return (
            self.names == kind.names
            and [len(ring) for ring in self.rings] == sizes
            and len(self.running) == len(LEVELS)
            and all(period.fits(kind) for period in self.running)
        )


class SavedSeries(Struct, array_like=True, frozen=True):
    """All saved tracks. `ended`: wall clock at the end, in seconds; `next`: number of the second
    that began then."""

    ended: float
    next: Annotated[int, Meta(ge=0, le=1 << 48)]
    seconds: tuple[float, ...]
    tracks: tuple[SavedTrack, ...]


class Track:
    """Group of series. `touched`: last second with any value."""

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
            # The period of level 0 stays empty: `_second` holds the values.
            self._running = [Period.of(kind) for _ in LEVELS]
        self._second: list[float] | None = None  # values of the last second
        # repeated sample, not in the periods yet
        self._sample, self._times, self._seconds = _NOTHING, 0, 0.0
        self._values: list[float] = []  # columns of one second of `_sample`

    def saved(self, key: Key) -> SavedTrack:
        self._settle()
        rings = tuple(ring.tobytes() for ring in self._rings)
        return SavedTrack(key, self.kind.names, self.touched, rings, tuple(self._running))

    def add(self, sample: Sample, number: int, seconds: float) -> None:
        """Add a second. Equal seconds without counts are collected, and added together when a
        different second comes."""
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
        """End the current period, which has this number."""
        if not level:
            values, self._second = self._second, None
        else:
            self._settle()
            period, self._running[level] = self._running[level], Period.of(self.kind)
            values = period.values(self.kind, self._nothing) if period.seconds else None
        self._put(level, number, values or [nan] * self._width)

    def skip(self, level: int, number: int) -> None:
        """Store a period without samples."""
        self._put(level, number, [nan] * self._width)

    def part(self, level: int, first: int, until: int, running: bool) -> dict[str, Column]:
        """Return column -> values of the periods from `first` up to `until`, then of the current
        period if `running`."""
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
    """All tracks by key. `limit`: number of tracks. A new track replaces the track without values
    for longest, if that track had no values within the last hour. A track without values in any
    kept period is removed when the longest period ends."""

    def __init__(self, limit: int) -> None:
        self.tracks: dict[Key, Track] = {}
        self.next = 0  # number of the next second
        self._limit = limit
        self._begun = [0 for _ in LEVELS]  # level -> number of the current period
        self._seconds = [0.0 for _ in LEVELS]  # level -> seconds in the current period

    def add(
        self, second: int, seconds: float, samples: Mapping[Key, tuple[SeriesKind, Sample]]
    ) -> None:
        """Add the given second, which is over and must be later than all before. `seconds`: time
        since the last sample."""
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
        """Return all tracks for saving, to be encoded before anything is added. `ended`: wall
        clock at the begin of the next second."""
        tracks = tuple(track.saved(key) for key, track in self.tracks.items())
        return SavedSeries(ended, self.next, tuple(self._seconds), tracks)

    def restore(
        self, saved: SavedSeries, gap: int, kind_of: Callable[[Key], SeriesKind | None]
    ) -> None:
        """Continue from saved tracks, `gap` seconds later. The gap has no values.

        Requires an empty history. Tracks of a wrong kind, or without values in any kept period,
        are left out.
        """
        if len(saved.seconds) != len(LEVELS):
            return
        for track in saved.tracks[: self._limit]:
            kind = kind_of(track.key)
            is_over = _over(track.touched, saved.next + gap)
            if kind is not None and track.fits(kind) and not is_over:
                self.tracks[track.key] = Track(kind, track.touched, track)
        self._begun = [saved.next // level.seconds for level in LEVELS]
        self._seconds = list(saved.seconds)
        self.next = saved.next + gap
        for level in range(len(LEVELS)):
            self._catch_up(level, self.next)

    def span(self, level: int, since: int = 0) -> tuple[int, int]:
        """Return the numbers of the first kept period, not before `since`, and of the current
        period."""
        until = self._begun[level]
        return min(until, max(since, until - LEVELS[level].points, 0)), until

    def part(self, key: Key, level: int, since: int = 0) -> dict[str, Column]:
        """Return a track's columns over `span`, then the current period of longer levels."""
        track = self.tracks.get(key)
        if track is None:
            return {}
        first, until = self.span(level, since)
        return track.part(level, first, until, running=self.runs(level))

    def runs(self, level: int) -> bool:
        """Return True if a period of this level is unfinished."""
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
    """Return True if the second `touched` lies in no period kept when `second` begins."""
    _, seconds, points = LEVELS[-1]
    return touched // seconds < second // seconds - points
