"""Custom metrics: metrics that models define, merged over all instances.

Each executor publishes the metrics of its model (`shmserve.shm.metrics_area`). The contents are
checked like any peer's message (I7), because one bad name would spoil a whole scrape. Pure.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise
from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

MAX_LABELS = 32  # per series
MAX_BUCKETS = 128  # per histogram
_RESERVED = ("shmserve_", "nv_inference_", "nv_cache_", "nv_gpu_", "nv_energy_")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_BUCKET_LABEL = "le"

Labels = tuple[tuple[str, str], ...]  # sorted by name


class MetricKind(IntEnum):
    """Kinds of metrics, with Triton's numbers and names."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Series(Struct, frozen=True, array_like=True):
    """Line of a family; for a histogram, all lines with equal labels. `buckets`: upper bounds of a
    histogram's buckets; one more bucket has no bound. `values`: one number; for a histogram, the
    observations in each bucket, then the sum of all observed values."""

    labels: Labels
    buckets: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


class Family(Struct, frozen=True, array_like=True):
    """All series of one name."""

    name: str
    help: str
    kind: MetricKind
    series: tuple[Series, ...] = ()


class InstanceMetrics(Struct, frozen=True, array_like=True):
    """Metrics of one instance's model."""

    model: str
    version: str
    instance: str
    families: tuple[Family, ...]


def name_fault(name: str) -> str:
    """Return the fault in a family's name, or ""."""
    if not _NAME.fullmatch(name):
        return "Invalid metric name"
    if name.startswith(_RESERVED):
        return f"the name '{name}' is reserved for the server's own metrics"
    return ""


def label_fault(name: str, kind: MetricKind) -> str:
    """Return the fault in a label's name, or ""."""
    own = kind is MetricKind.HISTOGRAM and name == _BUCKET_LABEL
    if own or name.startswith("__") or not _LABEL.fullmatch(name):
        return "Invalid label name"
    return ""


def bucket_fault(buckets: Sequence[float]) -> str:
    """Return the fault in a histogram's bounds, or ""."""
    if len(buckets) > MAX_BUCKETS:
        return f"there are {len(buckets)} buckets, more than {MAX_BUCKETS}"
    if not all(low < high for low, high in pairwise(buckets)):
        return "Bucket Boundaries must be strictly sorted"
    if not all(map(isfinite, buckets)):
        return "Bucket Boundaries must be finite"
    return ""


def width(kind: MetricKind, buckets: Sequence[float]) -> int:
    """Return the number of values of a series."""
    return len(buckets) + 2 if kind is MetricKind.HISTOGRAM else 1


def with_values(families: Iterable[Family], values: Sequence[float]) -> tuple[Family, ...] | None:
    """Return an executor's families with values filled in from one flat list, in the order of the
    series. Return None if the data are inconsistent."""
    filled: list[Family] = []
    at = 0
    for family in families:
        series: list[Series] = []
        for entry in family.series:
            end = at + width(family.kind, entry.buckets)
            series.append(replace(entry, values=tuple(values[at:end])))
            at = end
        filled.append(replace(family, series=tuple(series)))
    names = {family.name for family in filled}
    sound = at == len(values) and len(names) == len(filled) and all(map(_is_sound, filled))
    return tuple(filled) if sound else None


def _is_sound(family: Family) -> bool:
    kind, series = family.kind, family.series
    return (
        not name_fault(family.name)
        and len({entry.labels for entry in series}) == len(series)
        and all(
            len(dict(entry.labels)) == len(entry.labels) <= MAX_LABELS
            and not any(label_fault(name, kind) for name, _ in entry.labels)
            and not bucket_fault(entry.buckets)
            for entry in series
        )
    )


def merged(parts: Iterable[tuple[InstanceMetrics, bool]]) -> list[Family]:
    """Return the families of all instances by name, as exported.

    Counters and histograms with equal labels are added up. A gauge gets the label `instance` if
    its model has several instances (the flag beside each part), or if models share the gauge. An
    entry that contradicts an earlier one is left out: a name of another kind, a histogram with
    other buckets.
    """
    collected: dict[str, _Collected] = {}
    for part, has_several in parts:
        for family in part.families:
            into = collected.setdefault(family.name, _Collected(family))
            if into.kind is family.kind:
                into.add(family.series, part.instance, has_several)
    return [collected[name].family() for name in sorted(collected)]


class _Collected:
    """Family of one name, collected from several instances."""

    def __init__(self, first: Family) -> None:
        self.kind = first.kind
        self._first = first
        self._sums: dict[Labels, Series] = {}
        self._gauges: dict[Labels, dict[str, Series]] = {}  # labels -> instance -> gauge
        self._apart: set[Labels] = set()  # gauges exported with the label `instance`

    def add(self, series: Iterable[Series], instance: str, has_several: bool) -> None:
        for entry in series:
            labels = tuple(sorted(entry.labels))
            if self.kind is MetricKind.GAUGE:
                gauges = self._gauges.setdefault(labels, {})
                gauges[instance] = entry
                if has_several or len(gauges) > 1:
                    self._apart.add(labels)
                continue
            earlier = self._sums.get(labels)
            if earlier is None:
                self._sums[labels] = replace(entry, labels=labels)
            elif earlier.buckets == entry.buckets:
                pairs = zip(earlier.values, entry.values, strict=True)
                self._sums[labels] = replace(earlier, values=tuple(a + b for a, b in pairs))

    def family(self) -> Family:
        series = list(self._sums.values())
        for labels, gauges in self._gauges.items():
            for instance, entry in gauges.items():
                apart = labels in self._apart
                shown = _with_instance(labels, instance) if apart else labels
                series.append(replace(entry, labels=shown))
        series.sort(key=lambda entry: entry.labels)
        return replace(self._first, series=tuple(series))


def _with_instance(labels: Labels, instance: str) -> Labels:
    own = any(name == "instance" for name, _ in labels)
    return (*labels, ("shmserve_instance" if own else "instance", instance))
