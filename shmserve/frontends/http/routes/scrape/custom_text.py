"""Metrics reported by models, as lines of a scrape.

The lines are written here, in Triton's form. prometheus_client would append ``_total`` to the
names of counters, but models choose these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import inf, isinf, isnan

from shmserve.core.registry import Snapshot
from shmserve.core.stats.custom_metrics import (
    Family,
    InstanceMetrics,
    Labels,
    MetricKind,
    Series,
    merged,
)
from shmserve.protocol.control.stats_messages import Report
from shmserve.protocol.triton_config import instance_groups

_EXACT = 1 << 53  # smaller whole numbers are written without a point


def custom_text(report: Report, snapshot: Snapshot) -> bytes:
    """Return the lines to add to a scrape's answer."""
    parts = ((part, _has_several(part, snapshot)) for part in report.custom)
    lines = (line for family in merged(parts) for line in _lines(family))
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def _has_several(part: InstanceMetrics, snapshot: Snapshot) -> bool:
    """Return True if the model's configuration asks for several instances."""
    entry = snapshot.models.get(part.model, {}).get(part.version)
    if entry is None:
        return False
    return len(instance_groups.places(instance_groups.read(entry.spec.config))) > 1


def _lines(family: Family) -> Iterator[str]:
    if not family.series:
        return
    described = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {described}"
    yield f"# TYPE {family.name} {family.kind.name.lower()}"
    for series in family.series:
        if family.kind is MetricKind.HISTOGRAM:
            yield from _histogram(family.name, series)
        else:
            yield _line(family.name, series.labels, series.values[0])


def _histogram(name: str, series: Series) -> Iterator[str]:
    *counts, total = series.values
    yield _line(f"{name}_count", series.labels, sum(counts))
    yield _line(f"{name}_sum", series.labels, total)
    for bound, count in zip((*series.buckets, inf), accumulate(counts), strict=True):
        yield _line(f"{name}_bucket", (*series.labels, ("le", _number(bound))), count)


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{label}="{escaped(text)}"' for label, text in labels)
    return f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < _EXACT else repr(value)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
