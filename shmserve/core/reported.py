"""Values that models report about themselves, second by second. Pure.

An executor tells of each name its `kind`, the last second's `value` (of ``cdf``: values by
percent) and, where it says so, how many values that second had (`count`). Instances of one
model are put together here. What an executor says is checked like any peer's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan
from typing import Any

from msgspec import Struct

from shmserve.core.rates import PERCENTS

KINDS = {"avg": "mean", "max": "max", "min": "min", "inc": "mean"}  # how seconds become minutes
CDF = "cdf"
CDF_COLUMNS = (50, 90, 99)
MAX_NAMES = 256  # of one process
_MAX_NAME = 128


class Reported(Struct):
    """One name's last second in one process. `points`: (percent, value), of ``cdf``."""

    kind: str
    value: float = nan
    points: Sequence[tuple[float, float]] = ()
    count: float = 1.0


def parse(data: Any) -> dict[str, Reported]:
    """What one process told; what makes no sense is left out."""
    found: dict[str, Reported] = {}
    for name, entry in data.items() if isinstance(data, dict) else ():
        if len(found) >= MAX_NAMES:
            break
        one = _entry(entry) if isinstance(name, str) and 0 < len(name) <= _MAX_NAME else None
        if one is not None:
            found[name] = one
    return found


def merged(parts: Sequence[Reported]) -> Reported:
    """One name of all instances of a model; its kind is the first one's."""
    kind = parts[0].kind
    alike = [part for part in parts if part.kind == kind and part.count > 0]
    if not alike:
        return Reported(kind, count=0)
    count = sum(part.count for part in alike)
    if kind == CDF:
        return Reported(kind, points=_mixed(alike), count=count)
    values = [part.value for part in alike]
    if kind == "inc":
        return Reported(kind, sum(values), count=count)
    if kind == "avg":
        mean = sum(part.value * part.count for part in alike) / count
        return Reported(kind, mean, count=count)
    return Reported(kind, max(values) if kind == "max" else min(values), count=count)


def at_percents(points: Sequence[tuple[float, float]]) -> list[float]:
    """A distribution by `PERCENTS`; empty: there is none."""
    return [_at(points, percent) for percent in PERCENTS] if points else []


def gauges(one: Reported) -> list[float]:
    """As a second of a track: one value, or the `CDF_COLUMNS`."""
    if one.kind == CDF:
        return [_at(one.points, percent) if one.points else nan for percent in CDF_COLUMNS]
    if one.kind == "inc" and not one.count:
        return [0.0]
    return [one.value]


def _entry(entry: Any) -> Reported | None:
    if not isinstance(entry, dict):
        return None
    kind, value, count = entry.get("kind"), entry.get("value"), entry.get("count", 1)
    if not isinstance(count, int | float) or not 0 <= count < inf:
        return None
    if kind == CDF and isinstance(value, dict):
        points = sorted((_number(percent), _number(at)) for percent, at in value.items())
        if not all(isfinite(percent) and isfinite(at) for percent, at in points):
            return None
        return Reported(kind, points=points, count=float(count) if points else 0.0)
    if kind in KINDS and isfinite(_number(value)):
        return Reported(kind, _number(value), count=float(count))
    return None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return nan


def _at(points: Sequence[tuple[float, float]], percent: float) -> float:
    """Between two points that are known, a straight line."""
    before = points[0]
    for point in points:
        if point[0] >= percent:
            width = point[0] - before[0]
            share = (percent - before[0]) / width if width else 1.0
            return before[1] + (point[1] - before[1]) * share
        before = point
    return before[1]


def _mixed(parts: Sequence[Reported]) -> Sequence[tuple[float, float]]:
    """Several distributions as one, each with the weight of its number of values."""
    if len(parts) == 1:
        return parts[0].points
    weighted: list[tuple[float, float]] = []  # (value, share)
    for part in parts:
        before = 0.0
        for percent, value in part.points:
            weighted.append((value, (percent - before) * part.count))
            before = percent
    weighted.sort()
    total, passed = sum(share for _, share in weighted), 0.0
    points: list[tuple[float, float]] = []
    for value, share in weighted:
        passed += share
        points.append((100 * passed / total if total else 100.0, value))
    return points
