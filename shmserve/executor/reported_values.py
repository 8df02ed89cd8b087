"""Values that a model reports about itself, aggregated per second in the model's executor.

The coordinator asks for the values as a table, `AskStats("monitor")`, and for the history,
`AskStats("values")`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shmserve.core.stats.aggregation import PERCENTS
from shmserve.core.stats.counter_pages import Words

log = logging.getLogger(__name__)

MAX_NAMES = 256
MAX_SAMPLES = 1000  # kept per name and second, for a distribution
MAX_NAME = 128  # characters
_MESSAGE_BYTES = 96 * 1024  # limit for all names and values in one message, which takes 128 KiB
_ENTRY_BYTES = 16 + 9 * len(PERCENTS)
_PERCENTS = (50.0, 80.0, 90.0, 95.0, 99.0, 99.9, 99.99)


class _Second:
    """The values of one name in one second."""

    __slots__ = ("count", "number", "samples", "top", "total")

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.total = 0.0
        self.top = 0.0
        self.samples: list[float] = []

    def add(self, kind: str, value: float) -> None:
        better = value > self.top if kind == "max" else value < self.top
        if not self.count or better:
            self.top = value
        self.count += 1
        self.total += value
        if kind == "cdf" and len(self.samples) < MAX_SAMPLES:
            self.samples.append(value)

    def value(self, kind: str) -> Any:
        if kind == "cdf":
            names = (f"{percent:g}" for percent in _PERCENTS)
            return dict(zip(names, self.quantiles(_PERCENTS), strict=False))
        if kind == "inc":
            return self.total
        if not self.count:
            return 0.0
        return self.total / self.count if kind == "avg" else self.top

    def quantiles(self, percents: Sequence[float]) -> list[float]:
        """Return the value at each percentile, or an empty list if no value was reported."""
        ordered = sorted(self.samples)
        last = len(ordered) - 1
        return [ordered[min(last, int(p / 100 * len(ordered)))] for p in percents if ordered]


class _Series:
    """The values of one name: the current second and the last full second."""

    __slots__ = ("kind", "last", "now", "total")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.now = _Second(number)
        self.last = _Second(number - 1)
        self.total = 0.0  # sum over all seconds, for counters

    def roll(self, number: int) -> None:
        if number > self.now.number:
            over = self.now
            self.last = over if over.number == number - 1 else _Second(number - 1)
            self.now = _Second(number)

    def add(self, number: int, value: float) -> None:
        self.roll(number)
        self.now.add(self.kind, value)
        self.total += value


class ReportedValues:
    """Values by name, for any thread. A name keeps the aggregation of its first value."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._series: dict[str, _Series] = {}
        self._lock = threading.Lock()
        self._refused = False
        self._words: Words | None = None
        self._word = 0

    def publish(self, words: Words, word: int) -> None:
        """Count reported values in `words[word]`, which other processes read."""
        self._words, self._word = words, word

    def forked(self) -> None:
        """Stop counting in the shared word, in a process that the model has forked."""
        self._words = None
        self._lock = threading.Lock()

    def add(self, kind: str, name: str, value: float) -> None:
        name, value = str(name)[:MAX_NAME], float(value)
        number = int(self._now())
        with self._lock:
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MAX_NAMES:
                    if not self._refused:
                        log.warning("monitor: more than %d names; others are dropped", MAX_NAMES)
                    self._refused = True
                    return
                series = self._series[name] = _Series(kind, number)
            series.add(number, value)
            if self._words is not None:
                self._words[self._word] += 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return by name: `kind`, `value` of the last full second (cdf: by percentile), `total`."""
        number = int(self._now())
        with self._lock:
            for series in self._series.values():
                series.roll(number)
            return {
                name: {"kind": s.kind, "value": s.last.value(s.kind), "total": s.total}
                for name, s in self._series.items()
            }

    def last_second(self) -> dict[str, tuple[str, int, Any]]:
        """Return by name: kind, number of values in the last full second, and the aggregate (cdf:
        the values at `PERCENTS`). Names that do not fit into one message are left out."""
        number = int(self._now())
        values: dict[str, tuple[str, int, Any]] = {}
        room = _MESSAGE_BYTES
        with self._lock:
            for name, series in self._series.items():
                series.roll(number)
                last, kind = series.last, series.kind
                room -= len(name.encode(errors="replace")) + _ENTRY_BYTES
                if room < 0:
                    break
                value = last.quantiles(PERCENTS) if kind == "cdf" else last.value(kind)
                values[name] = (kind, last.count, value)
        return values
