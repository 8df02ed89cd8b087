"""Metric series as GRPS clients read them: by name, in one list over all time spans.

System names are the names on GRPS's metrics page. Any other name is a value that models report
about themselves, aggregated over all models that report it.
"""

import re
from collections.abc import Sequence
from typing import Any

from shmserve.core.stats.model_metrics import CDF
from shmserve.core.stats.time_series import LEVELS, Column
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.history_messages import HistoryReport, ValueHistory

UNKNOWN = "key not found"
_TOTAL = {
    "*qps": "requests",
    "*fail_rate(%)": "failed",
    "*latency_avg(ms)": "latency_avg",
    "*latency_max(ms)": "latency_max",
}
_SYSTEM = {"*cpu_usage(%)": "cpu", "*mem_usage(%)": "memory_percent"}
_GPU = re.compile(r"\*gpu(\d{1,3})_(usage\(%\)|mem_usage\(MIB\))")
_MIB = 1 << 20
_LATENCY = "*latency_cdf(ms)"
# GRPS's numbers for `core.stats.aggregation.PERCENTS`
_PERCENTS = (*range(10, 91, 10), *range(91, 102))


class GrpsSeries:
    def __init__(self, dispatcher: DispatchApi) -> None:
        self._dispatcher = dispatcher

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a trend (30 days, 24 hours, 60 minutes, 60 seconds, oldest first), or the
        distribution of the last second. Return None if the name is unknown. Raise Unavailable if
        the coordinator is away, and did not come back in time."""
        seconds = self._history(0)
        if name == _LATENCY:
            return _cdf(seconds.latest)
        values = [value for value in seconds.values if value.name == name]
        system_values = _own(seconds, name)
        if system_values is None and not values:
            return None
        if system_values is None and values[0].kind == CDF:
            return _cdf(next((value.latest for value in values if value.latest), ()))
        points: list[float] = []
        for level in reversed(range(len(LEVELS))):
            history = self._history(level) if level else seconds
            column = _own(history, name)
            if column is None:
                column = _together([value for value in history.values if value.name == name])
            whole = [value or 0.0 for value in column[: history.until - history.first]]
            points += [0.0] * (LEVELS[level].points - len(whole)) + whole
        return {"label": "trend", "data": [list(point) for point in enumerate(points)]}

    def _history(self, level: int) -> HistoryReport:
        return self._dispatcher.coordinator.history(level, brief=True)


def _own(history: HistoryReport, name: str) -> Column | None:
    """Return the values of a system name; None for another name, or a GPU without history."""
    if name in _TOTAL:
        return history.total.get(_TOTAL[name], [])
    if name in _SYSTEM:
        return history.system.get(_SYSTEM[name], [])
    match = _GPU.fullmatch(name)
    columns = [gpu.columns for gpu in history.gpus if match and gpu.index == int(match[1])]
    if match is None or not columns:
        return None
    if match[2].startswith("mem"):
        return [None if used is None else used / _MIB for used in columns[-1]["memory"]]
    return columns[-1]["utilization"]


def _together(values: Sequence[ValueHistory]) -> Column:
    """Aggregate the values of several models, as the kind of the first value says."""
    kind = values[0].kind if values else ""
    columns = [value.columns["value"] for value in values if value.kind == kind]
    column: Column = []
    for cells in zip(*columns, strict=True):
        present = [cell for cell in cells if cell is not None]
        if not present:
            column.append(None)
        elif kind == "inc":
            column.append(sum(present))
        elif kind == "avg":
            column.append(sum(present) / len(present))
        else:
            column.append(max(present) if kind == "max" else min(present))
    return column


def _cdf(latest: Sequence[float]) -> dict[str, Any]:
    values = latest or [0.0] * len(_PERCENTS)
    return {"label": "cdf", "data": [list(pair) for pair in zip(_PERCENTS, values, strict=True)]}
