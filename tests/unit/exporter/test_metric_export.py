"""Families of Prometheus as the SDK has metrics."""

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from shmserve.exporter.metric_export import converted
from shmserve.exporter.span_export import SCOPE

NOW = 1_700_000_000_000_000_000


def test_each_kind_of_family_becomes_what_it_is() -> None:
    counter = CounterMetricFamily("shmserve_copied_bytes", "Bytes", labels=("model",))
    counter.add_metric(["m"], 7)
    histogram = HistogramMetricFamily("shmserve_request_duration_seconds", "s", labels=("model",))
    histogram.add_metric(["m"], [("0.1", 2), ("1", 5), ("+Inf", 6)], 3.5)
    histogram.add_metric(["n"], [("0.1", 0), ("1", 0), ("+Inf", 1)], 9.0)
    info = InfoMetricFamily("shmserve_build", "Version")
    info.add_metric([], {"version": "1"})
    empty = GaugeMetricFamily("shmserve_nothing", "None", labels=("x",))
    families = [counter, histogram, info, empty, GaugeMetricFamily("shmserve_pool", "P", value=3)]
    metrics = {metric.name: metric for metric in converted(families, NOW)}
    assert list(metrics) == [f.name for f in families if f is not empty]
    scope = ScopeMetrics(SCOPE, list(metrics.values()), "")
    data = MetricsData([ResourceMetrics(Resource({}), [scope], "")])
    sent = {m.name: m for m in encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics}
    total = sent["shmserve_copied_bytes"]
    assert (total.unit, total.sum.is_monotonic) == ("By", True)
    (point,) = total.sum.data_points
    assert (point.as_double, point.time_unix_nano) == (7, NOW)
    assert point.attributes[0].key == "model"
    first, second = sent["shmserve_request_duration_seconds"].histogram.data_points
    assert (list(first.explicit_bounds), list(first.bucket_counts)) == ([0.1, 1], [2, 3, 1])
    assert (first.count, first.sum) == (6, 3.5)
    assert list(second.bucket_counts) == [0, 0, 1]
    assert sent["shmserve_build"].gauge.data_points[0].attributes[0].value.string_value == "1"
    assert sent["shmserve_pool"].gauge.data_points[0].as_double == 3
