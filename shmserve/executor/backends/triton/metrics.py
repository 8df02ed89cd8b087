"""Custom metrics (`pb_utils.MetricFamily`): a model's own metrics, shown with the server's.

Metrics are usable only as long as their family exists. A model must keep the family object.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from shmserve.core.stats.custom_metrics import MetricKind
from shmserve.errors import ShmserveError
from shmserve.executor import custom_metrics
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.custom_metrics import CustomMetrics, MetricRow

COUNTER = MetricKind.COUNTER
GAUGE = MetricKind.GAUGE
HISTOGRAM = MetricKind.HISTOGRAM

# Triton's texts
_LABELS = "Failed to create metric. Labels must be a dictionary."
_BUCKETS = "Failed to create metric. Buckets must be a list."
_NO_BUCKETS = "Failed to create metric. Missing required buckets."
_UNEXPECTED_BUCKETS = "Failed to create metric. Unexpected buckets found."
_NOT_TEXT = "Error when creating Metric: attempt to access JSON non-string as string"
_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)
_DECREASED = "can only be incremented monotonically by non-negative values."


class Metric:
    """Counter, gauge or histogram, obtained from a family. Two metrics of a family with the same
    labels are the same metric."""

    __slots__ = ("_metrics", "_row")

    def __init__(self, *parts: Any, **_options: object) -> None:
        """Make a metric from the executor's metrics and one row (for the server, not for
        models)."""
        if len(parts) != 2 or not isinstance(parts[0], CustomMetrics):
            raise TypeError("Metric: No constructor defined!")
        self._metrics: CustomMetrics = parts[0]
        self._row: MetricRow | None = parts[1]

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. For a gauge, `value` may be negative.

        Raises:
            TypeError: `value` is no number.
            TritonModelException: a counter would decrease, the metric's kind does not support the
                method, or the family has been deleted. The same holds for the other methods.
        """
        row = self._usable("increment", "Increment", COUNTER, GAUGE)
        number = _number(value)
        if number < 0 and row.family.kind is COUNTER:
            raise _failed("increment", f"TRITONSERVER_METRIC_KIND_COUNTER {_DECREASED}")
        self._metrics.increment(row, number)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        row = self._usable("set", "Set", GAUGE)
        self._metrics.set(row, _number(value))

    def observe(self, value: float) -> None:
        """Count a value in a bucket of a histogram."""
        row = self._usable("observe", "Observe", HISTOGRAM)
        self._metrics.observe(row, _number(value))

    def value(self) -> float:
        """Return the value of a counter or gauge in this instance."""
        return self._usable("get", "Value", COUNTER, GAUGE).values[0]

    def forget(self) -> None:
        """Make the metric unusable after the deletion of its family (for the server, not for
        models)."""
        self._row = None

    def _usable(self, doing: str, operation: str, *kinds: MetricKind) -> MetricRow:
        row = self._row
        if row is None:
            raise _failed(doing, _DELETED)
        own = row.family.kind
        if own not in kinds:
            raise _failed(
                doing, f"TRITONSERVER_METRIC_KIND_{own.name} does not support {operation}"
            )
        return row


class MetricFamily:
    """Metrics of one name and kind. Models make families.

    Raises:
        TypeError: an argument has a wrong type.
        TritonModelException: the name is invalid or used by a family of another kind, or there are
            too many families.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        for what, value, wanted in (
            ("name", name, str),
            ("description", description, str),
            ("kind", kind, MetricKind),
        ):
            if not isinstance(value, wanted):
                raise TypeError(f"MetricFamily: {what} cannot be {type(value).__name__}")
        self._metrics = custom_metrics.registry
        self._metric_of_row: dict[MetricRow, Metric] = {}
        try:
            self._family = self._metrics.open(name, description, kind)
        except ShmserveError as ex:
            raise TritonModelException(f"Error when creating MetricFamily: {ex.message}") from None

    def Metric(  # noqa: N802
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """Return the family's metric with these labels, new or existing.

        `buckets`: ascending upper bounds of a histogram's buckets. A last bucket without a bound
        is added.

        Raises:
            TritonModelException: labels are no dict of texts or have invalid names; buckets are
                missing, no list, not sorted, or given for another kind than a histogram; or there
                are too many metrics.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException(_LABELS)
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException(_BUCKETS)
        has_buckets = self._family.kind is HISTOGRAM
        if has_buckets and buckets is None:
            raise TritonModelException(_NO_BUCKETS)
        if buckets is not None and not has_buckets:
            raise TritonModelException(_UNEXPECTED_BUCKETS)
        pairs = list((labels or {}).items())
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TritonModelException(_NOT_TEXT)
        try:
            row = self._metrics.add(
                self._family, pairs, _bounds(buckets or ()), self._metric_of_row
            )
        except ShmserveError as ex:
            raise TritonModelException(f"Error when creating Metric: {ex.message}") from None
        return self._metric_of_row.setdefault(row, Metric(self._metrics, row))

    def __del__(self) -> None:
        if hasattr(self, "_family"):
            for metric in self._metric_of_row.values():
                metric.forget()
            self._metrics.let_go(self._family, list(self._metric_of_row))


def _bounds(buckets: Sequence[Any]) -> list[float]:
    bounds = [_number(bound) for bound in buckets]
    # a bucket without a bound is always added
    return bounds[:-1] if bounds and bounds[-1] == inf else bounds


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"a metric's value cannot be {type(value).__name__}")
    return float(value)


def _failed(doing: str, why: str) -> TritonModelException:
    return TritonModelException(f"Failed to {doing} metric value: {why}")
