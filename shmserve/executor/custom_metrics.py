"""Registry of the metrics that the model of this executor defines.

The model reaches `registry` as `Context.metrics`, `pb_utils.MetricFamily` or `app_monitor`. Metric
families are for scrapes. `values` are aggregated per second, for the metrics page.

Any thread of the model may create, change and release families. Finalizers release families, too,
and may interrupt any line of this file. A finalizer therefore never waits for the lock: the holder
of the lock does the finalizer's work.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Container, Mapping, Sequence

from shmserve.core.stats import custom_metrics
from shmserve.core.stats.counter_pages import Words
from shmserve.core.stats.custom_metrics import Family, Labels, MetricKind, Series
from shmserve.errors import (
    ArenaExhausted,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ShmserveError,
)
from shmserve.executor.reported_values import ReportedValues
from shmserve.shm.metrics_area import MetricsArea

log = logging.getLogger(__name__)

_MAX_HELP = 1024
MAX_FAMILIES = 64  # limit of metric names
MAX_SERIES = 512  # limit of series (a name with labels)
MAX_TEXT = 256  # limit of characters in a name, a label or a label's value


class _Held:
    """Reference count: a family or series exists until all holders have let go."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders = 0

    def hold(self) -> None:
        self.holders += 1

    def let_go(self) -> bool:
        """Return whether the last holder has let go."""
        self.holders -= 1
        return not self.holders


class MetricRow(_Held):
    """A series: one set of labels of a family.

    Attributes:
        place: index of the first value of the series among the published values.
    """

    __slots__ = ("buckets", "family", "labels", "place", "values")

    def __init__(self, family: MetricRows, labels: Labels, buckets: tuple[float, ...]) -> None:
        super().__init__()
        self.family = family
        self.labels = labels
        self.buckets = buckets
        self.values = [0.0] * custom_metrics.width(family.kind, buckets)
        self.place = 0

    def move(self, place: int) -> int:
        """Move to an index among the published values; return the index behind the last value."""
        self.place = place
        return place + len(self.values)


class MetricRows(_Held):
    """A family: all series of a name."""

    __slots__ = ("help", "kind", "name", "rows")

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        super().__init__()
        self.name = name
        self.help = description[:_MAX_HELP].encode(errors="replace").decode()
        self.kind = kind
        self.rows: dict[Labels, MetricRow] = {}


class Counter:
    """A growing series of a native model. Like gauges and histograms, for any thread."""

    __slots__ = ("_metrics", "_row")

    def __init__(self, metrics: CustomMetrics, row: MetricRow) -> None:
        self._metrics = metrics
        self._row = row

    @property
    def value(self) -> float:
        """Return the current value in this instance."""
        return self._row.values[0]

    def increment(self, value: float = 1.0) -> None:
        """Add to the value.

        Raises:
            ValueError: the value would shrink.
        """
        number = float(value)
        if not number >= 0:
            raise ValueError(f"counter '{self._row.family.name}' cannot grow by {number:g}")
        self._metrics.increment(self._row, number)


class Gauge(Counter):
    """A series that can take any value."""

    __slots__ = ()

    def increment(self, value: float = 1.0) -> None:
        self._metrics.increment(self._row, float(value))

    def set(self, value: float) -> None:
        self._metrics.set(self._row, float(value))


class Histogram:
    """A series that counts values in buckets."""

    __slots__ = ("_metrics", "_row")

    def __init__(self, metrics: CustomMetrics, row: MetricRow) -> None:
        self._metrics = metrics
        self._row = row

    def observe(self, value: float) -> None:
        self._metrics.observe(self._row, float(value))


class CustomMetrics:
    """All metric families of the model. Other processes see the families once an `area` is set."""

    def __init__(self, area: MetricsArea | None = None) -> None:
        self._area = area
        self._lock = threading.Lock()  # guards the attributes below
        self._families: dict[str, MetricRows] = {}
        self._words: memoryview[float] | None = None
        # released, not yet removed
        self._released: deque[tuple[MetricRows, Sequence[MetricRow]]] = deque()
        self.values = ReportedValues()

    def publish(self, area: MetricsArea, words: Words, word: int) -> None:
        """Publish families in `area`, and count reported values in `words[word]`, from now on."""
        self._area = area
        self.values.publish(words, word)

    def forked(self) -> None:
        """Stop publishing, in a process that the model has forked: the counts of a fork are
        private."""
        self._area = self._words = None
        self._lock = threading.Lock()
        self.values.forked()

    def counter(
        self, name: str, description: str, labels: Mapping[str, str] | None = None
    ) -> Counter:
        """Return a counter that lives as long as the instance. A counter that exists with this
        name and these labels is returned again.

        Raises:
            Internal: the name is bad or taken, a label is bad, or there are too many metrics.
                Gauges and histograms raise this error, too.
        """
        return Counter(self, self._row(MetricKind.COUNTER, name, description, labels))

    def gauge(self, name: str, description: str, labels: Mapping[str, str] | None = None) -> Gauge:
        """Return a gauge, a value that goes up and down; otherwise as `counter`."""
        return Gauge(self, self._row(MetricKind.GAUGE, name, description, labels))

    def histogram(
        self,
        name: str,
        description: str,
        buckets: Sequence[float],
        labels: Mapping[str, str] | None = None,
    ) -> Histogram:
        """Return a histogram; otherwise as `counter`.

        Args:
            buckets: ascending upper bounds; a last bucket without bound is added.
        """
        kind = MetricKind.HISTOGRAM
        return Histogram(self, self._row(kind, name, description, labels, buckets))

    def _row(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        labels: Mapping[str, str] | None,
        buckets: Sequence[float] = (),
    ) -> MetricRow:
        try:
            family = self.open(name, description, kind)
            try:
                return self.add(family, list((labels or {}).items()), list(map(float, buckets)), ())
            except ShmserveError:
                self.let_go(family, ())
                raise
        # the error of the model, not of the request that the model works on
        except ShmserveError as ex:
            raise Internal(f"metric '{name[:80]}': {ex.message}") from None

    def open(self, name: str, description: str, kind: MetricKind) -> MetricRows:
        """Return the family of this name, which is created if needed. An existing family keeps its
        description. A family exists until all users have let go.

        Raises:
            InvalidArgument: the name is bad, or taken by a family of another kind.
            ResourceExhausted: there are too many families.
        """
        self._check_text("name", name)
        fault = custom_metrics.name_fault(name)
        if fault:
            raise InvalidArgument(fault)
        with self._lock:
            self._remove_released()
            family = self._families.get(name)
            if family is None:
                if len(self._families) >= MAX_FAMILIES:
                    raise ResourceExhausted(f"the model has {MAX_FAMILIES} metric names already")
                family = self._families[name] = MetricRows(name, description, kind)
            elif family.kind is not kind:
                raise InvalidArgument("Family name already exists with different type")
            family.hold()
        self._settle()
        return family

    def add(
        self,
        family: MetricRows,
        labels: Sequence[tuple[str, str]],
        buckets: Sequence[float],
        held: Container[MetricRow],
    ) -> MetricRow:
        """Return the series of a family with these labels, which is created if needed.

        Args:
            held: series that the caller holds already, which are not held a second time.

        Raises:
            InvalidArgument: a label's name or the buckets are bad, or there are too many labels.
            ResourceExhausted: there are too many series, or no memory is left to publish them.
        """
        self._check_labels(family.kind, labels)
        fault = custom_metrics.bucket_fault(buckets)
        if fault:
            raise InvalidArgument(fault)
        key = tuple(sorted(labels))
        with self._lock:
            self._remove_released()
            row = family.rows.get(key)
            if row is None:
                if sum(len(f.rows) for f in self._families.values()) >= MAX_SERIES:
                    raise ResourceExhausted(f"the model has {MAX_SERIES} metrics already")
                row = family.rows[key] = MetricRow(family, key, tuple(buckets))
                try:
                    self._publish()
                except BaseException:
                    del family.rows[key]
                    raise
            if row not in held:
                row.hold()
        self._settle()
        return row

    def let_go(self, family: MetricRows, rows: Sequence[MetricRow]) -> None:
        """Release a family, and series of the family, for a caller of `open` and `add`. Safe in
        finalizers."""
        self._released.append((family, rows))
        self._settle()

    def increment(self, row: MetricRow, value: float) -> None:
        with self._lock:
            self._store(row, 0, row.values[0] + value)
        self._settle()

    def set(self, row: MetricRow, value: float) -> None:
        with self._lock:
            self._store(row, 0, value)
        self._settle()

    def observe(self, row: MetricRow, value: float) -> None:
        bucket = bisect_left(row.buckets, value)
        total = len(row.values) - 1
        with self._lock:
            self._store(row, bucket, row.values[bucket] + 1)
            self._store(row, total, row.values[total] + value)
        self._settle()

    def _store(self, row: MetricRow, index: int, value: float) -> None:
        row.values[index] = value
        if self._words is not None and row.holders:
            self._words[row.place + index] = value

    # ------------------------------------------------------------- released metrics

    def _settle(self) -> None:
        """Do the work that finalizers have left. If another thread has the lock, that thread does
        the work on release."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._remove_released()
            finally:
                self._lock.release()

    def _remove_released(self) -> None:
        is_changed = False
        while self._released:
            family, rows = self._released.popleft()
            for row in rows:
                if row.let_go():
                    is_changed = family.rows.pop(row.labels, None) is not None or is_changed
            if family.let_go():
                self._families.pop(family.name, None)
        if is_changed:
            try:
                self._publish()
            except ArenaExhausted as ex:  # unlikely: the new table is smaller than before
                log.error("deleted metrics are still shown: %s", ex.message)

    # -------------------------------------------------------------- publication

    def _publish(self) -> None:
        if self._area is None:
            return
        rows = [row for family in self._families.values() for row in family.rows.values()]
        values = [value for row in rows for value in row.values]
        families = [
            Family(
                family.name,
                family.help,
                family.kind,
                tuple(Series(row.labels, row.buckets) for row in family.rows.values()),
            )
            for family in self._families.values()
            if family.rows
        ]
        self._words = self._area.write(families, values)
        place = 0
        for row in rows:
            place = row.move(place)

    # -------------------------------------------------------------------- checks

    def _check_labels(self, kind: MetricKind, labels: Sequence[tuple[str, str]]) -> None:
        if len(labels) > custom_metrics.MAX_LABELS:
            raise InvalidArgument(
                f"there are {len(labels)} labels, more than {custom_metrics.MAX_LABELS}"
            )
        for name, value in labels:
            self._check_text("label", name)
            self._check_text(f"value of label '{name}'", value)
            fault = custom_metrics.label_fault(name, kind)
            if fault:
                raise InvalidArgument(fault)

    def _check_text(self, what: str, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidArgument(f"the {what} is not a string")
        if text.encode(errors="replace").decode() != text:
            raise InvalidArgument(f"the {what} is not UTF-8")
        if len(text) > MAX_TEXT:
            raise InvalidArgument(f"the {what} has {len(text)} characters, more than {MAX_TEXT}")


registry = CustomMetrics()  # an executor runs one model


os.register_at_fork(after_in_child=lambda: registry.forked())
