"""Model metrics: values that models report about themselves, second by second. Pure.

For each name an executor reports the rule for combining values (`kind`), the number of values in
the last second, and the result. The instances of a model are merged here. Reports are checked like
any peer's message.
"""

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

from msgspec import Struct

from shmserve.core.stats.aggregation import PERCENTS

# kind -> rule for making minutes of seconds
KINDS = {"avg": "mean", "max": "max", "min": "min", "inc": "mean"}
CDF = "cdf"
CDF_COLUMNS = (50, 90, 99)
_MAX_NAMES = 256  # per process
_MAX_NAME = 128
_LIMIT = 1e300  # keeps sums of reported values finite
_AT = [PERCENTS.index(percent) for percent in CDF_COLUMNS]


class ModelMetrics(Struct):
    """Last second of one name in one process. `points`: for ``cdf``, values by `PERCENTS`."""

    kind: str
    value: float = nan
    points: Sequence[float] = ()
    count: int = 0


def parse(data: Any) -> dict[str, ModelMetrics]:
    """Return the metrics sent by one process, by name. Malformed metrics are left out."""
    metrics: dict[str, ModelMetrics] = {}
    for name, entry in data.items() if isinstance(data, dict) else ():
        if len(metrics) >= _MAX_NAMES:
            break
        metric = _entry(entry) if isinstance(name, str) and 0 < len(name) <= _MAX_NAME else None
        if metric is not None:
            metrics[name] = metric
    return metrics


def merged(parts: Sequence[ModelMetrics]) -> ModelMetrics:
    """Return one name merged over all instances of a model, with the kind of the first instance.
    Instances with another kind are left out."""
    kind = parts[0].kind
    alike = [part for part in parts if part.kind == kind and part.count]
    count = sum(part.count for part in alike)
    if kind == "inc":
        return ModelMetrics(kind, sum(part.value for part in alike), count=count)
    if not alike:
        return ModelMetrics(kind)
    if kind == CDF:
        return ModelMetrics(kind, points=_mixed(alike), count=count)
    values = [part.value for part in alike]
    if kind == "avg":
        mean = sum(part.value * part.count for part in alike) / count
        return ModelMetrics(kind, mean, count=count)
    return ModelMetrics(kind, max(values) if kind == "max" else min(values), count=count)


def gauges(metric: ModelMetrics) -> list[float]:
    """Return a second of a track: one value, or the `CDF_COLUMNS`."""
    if metric.kind == CDF:
        return [metric.points[at] if metric.points else nan for at in _AT]
    return [metric.value]


def _entry(entry: Any) -> ModelMetrics | None:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        return None
    kind, count, value = entry
    if not isinstance(count, int) or not 0 <= count < 1 << 53:
        return None
    if kind == CDF and isinstance(value, list | tuple):
        points = [_number(point) for point in value]
        whole = len(points) == (len(PERCENTS) if count else 0) and all(map(isfinite, points))
        return ModelMetrics(kind, nan, points, count) if whole else None
    if isinstance(kind, str) and kind in KINDS and isfinite(_number(value)):
        return ModelMetrics(kind, _number(value), (), count)
    return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < _LIMIT else nan


def _mixed(parts: Sequence[ModelMetrics]) -> Sequence[float]:
    """Return several distributions as one, weighted by their numbers of values."""
    if len(parts) == 1:
        return parts[0].points
    weighted: list[tuple[float, float]] = []  # (value, share)
    for part in parts:
        before = 0.0
        for percent, value in zip(PERCENTS, part.points, strict=True):
            weighted.append((value, (percent - before) * part.count))
            before = percent
    weighted.sort()
    total = sum(share for _, share in weighted)
    points: list[float] = []
    passed = 0.0
    for value, share in weighted:
        passed += share
        while len(points) < len(PERCENTS) and passed >= PERCENTS[len(points)] / 100 * total:
            points.append(value)
    return points + [weighted[-1][0]] * (len(PERCENTS) - len(points))
