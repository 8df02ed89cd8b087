"""Export of metrics: sends the families of `/metrics` to the collector."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.exporter.collector import Collector
from shmserve.exporter.span_export import SCOPE

_log = logging.getLogger(__name__)

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By", "celsius": "Cel", "watts": "W", "joules": "J"}
# The start time of counters is left unset. A restarted exporter does not know the time, and any
# other value would look like a reset of all counters.
_UNKNOWN_START = 0

Collect = Callable[[], Iterable[Family]]


class MetricExport:
    """Thread that exports the families from `collect` every `otlp_metrics_interval_s`."""

    def __init__(self, settings: Settings, resource: Resource, collect: Collect) -> None:
        self._interval_s = settings.otlp_metrics_interval_s
        self._resource = resource
        self._collect = collect
        self._stop = threading.Event()
        self._collector: Collector[MetricsData] = Collector(
            "metrics", "metrics", OTLPMetricExporter, settings, self._stop
        )
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Export once more if `within_s` seconds suffice, and end."""
        self._stop.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._stop.wait(self._interval_s)
            try:
                metrics = list(converted(self._collect(), time.time_ns()))
            except ShmserveError as ex:  # no coordinator is running now
                _log.debug("metrics were not exported: %s", ex)
                continue
            scope = ScopeMetrics(SCOPE, metrics, "")
            self._collector.try_once(MetricsData([ResourceMetrics(self._resource, [scope], "")]))


def converted(families: Iterable[Family], now_ns: int) -> Iterator[Metric]:
    """Yield the families as OpenTelemetry metrics under the same names, counters without
    `_total`."""
    for family in families:
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(list(_histograms(family, now_ns)), _CUMULATIVE)
        elif family.type == "counter":
            points = _numbers(family.samples, "_total", _UNKNOWN_START, now_ns)
            data = Sum(points, _CUMULATIVE, is_monotonic=True)
        else:  # a gauge, or an info
            data = Gauge(_numbers(family.samples, "", None, now_ns))
        if data.data_points:
            unit = next((u for word, u in _UNITS.items() if family.name.endswith(f"_{word}")), "1")
            yield Metric(family.name, family.documentation, unit, data)


def _numbers(
    samples: Iterable[Sample], ending: str, start_ns: int | None, now_ns: int
) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(sample.labels, start_ns, now_ns, float(sample.value))  # type: ignore[arg-type]
        for sample in samples
        if sample.name.endswith(ending)
    ]


def _histograms(family: Family, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a data point for each set of labels. A family has cumulated counts, one sample per
    bucket."""
    points: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        if sample.name.endswith("_bucket"):
            points.setdefault(key, {})[float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    for key, cumulated in points.items():
        bounds = sorted(cumulated)
        totals = [int(cumulated[bound]) for bound in bounds]
        counts = [after - before for before, after in zip([0, *totals], totals, strict=False)]
        yield HistogramDataPoint(
            dict(key), _UNKNOWN_START, now_ns, totals[-1], sums.get(key, 0.0), counts,
            [bound for bound in bounds if bound != math.inf], None, None,  # type: ignore[arg-type]
        )  # fmt: skip
