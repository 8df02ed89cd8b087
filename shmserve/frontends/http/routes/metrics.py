"""``/metrics``: all numbers in Prometheus' text format.

They come from the pages of counters, by way of the coordinator: no process is asked, so none
that is stuck can hold a scrape up. Names of what Triton's dashboards ask for can be added
(`metrics_triton_names`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic_ns

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

import shmserve
from shmserve.config import Settings
from shmserve.core.registry import ModelState, Snapshot
from shmserve.core.stats.counter_pages import BOUNDS_NS, cumulated
from shmserve.core.stats.executor_counters import OTHER_SIZES, STAGES
from shmserve.core.stats.request_counters import COPIES, Reason
from shmserve.frontends.http.routes.gpu_metrics import gpu_families
from shmserve.frontends.http.routes.triton_metrics import triton_text
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.protocol.control.stats_messages import ModelReport, ProcessReport, Report

__all__ = ["CONTENT_TYPE", "Metrics"]

_MODEL = ("model", "version")
_BOUNDS = [f"{ns / 1e9:g}" for ns in BOUNDS_NS] + ["+Inf"]
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Numbers = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """`text` is a scrape's answer."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._triton_names = settings.metrics_triton_names

    def text(self) -> bytes:
        """All metrics as of now.

        Raises:
            Unavailable: the coordinator is away, and did not come back in time.
        """
        report = self._dispatcher.server.report()
        snapshot = self._dispatcher.snapshot()
        text = generate_latest(_Collector(report, snapshot))
        return text + triton_text(report).encode() if self._triton_names else text


class _Collector(Collector):
    """One scrape."""

    def __init__(self, report: Report, snapshot: Snapshot) -> None:
        self._report = report
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        return families(self._report, self._snapshot)


def families(report: Report, snapshot: Snapshot) -> Iterator[Metric]:
    """All metric families of the server's own names."""
    info = InfoMetricFamily("shmserve_build", "Version of the server")
    info.add_metric([], {"version": shmserve.__version__})
    yield info
    models = sorted(report.models, key=lambda model: (model.model, model.version))
    yield from _requests(models)
    yield from _durations(models)
    yield from _executions(models)
    yield from _processes(report)
    yield from _memory(report)
    yield from gpu_families(report.gpus)
    states = Counter(
        entry.state.value for versions in snapshot.models.values() for entry in versions.values()
    )
    yield _family(
        GaugeMetricFamily("shmserve_models", "Model versions by state", labels=("state",)),
        [((state.value,), states[state.value]) for state in ModelState],
    )


def _family(family: Numbers, rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _requests(models: list[ModelReport]) -> Iterator[Metric]:
    counts = [
        (model.model, model.version, protocol, counts)
        for model in models
        for protocol, counts in sorted(model.requests.items())
    ]
    yield _family(
        CounterMetricFamily(
            "shmserve_requests",
            "Inference requests for models that are ready, by their outcome's time",
            labels=(*_MODEL, "protocol"),
        ),
        [((name, version, of), c.requests) for name, version, of, c in counts],
    )
    yield _family(
        CounterMetricFamily(
            "shmserve_request_failures",
            "Inference requests that failed, by reason",
            labels=(*_MODEL, "protocol", "reason"),
        ),
        [
            ((name, version, of, reason.name.lower()), c.failures[reason])
            for name, version, of, c in counts
            for reason in Reason
        ],
    )
    yield _family(
        CounterMetricFamily(
            "shmserve_copied_bytes",
            "Bytes of tensors copied in user space, by stage",
            labels=(*_MODEL, "stage"),
        ),
        [
            ((model.model, model.version, stage), model.all_requests().copied[index])
            for model in models
            for index, stage in enumerate(COPIES)
        ],
    )


def _durations(models: list[ModelReport]) -> Iterator[Metric]:
    whole = HistogramMetricFamily(
        "shmserve_request_duration_seconds",
        "From a request's arrival to its answer being ready to send; answered requests",
        labels=_MODEL,
    )
    stages = HistogramMetricFamily(
        "shmserve_stage_duration_seconds",
        "Time of answered requests in the executor, by stage",
        labels=(*_MODEL, "stage"),
    )
    for model in models:
        labels = [model.model, model.version]
        requests, runs = model.all_requests(), model.runs
        _observe(whole, labels, requests.buckets, requests.success_ns)
        for stage, buckets, ns in zip(STAGES, runs.buckets, runs.stage_ns, strict=True):
            _observe(stages, [*labels, stage], buckets, ns)
    yield whole
    yield stages


def _observe(family: HistogramMetricFamily, labels: list[str], buckets: list[int], ns: int) -> None:
    counts = list(zip(_BOUNDS, cumulated(buckets), strict=True))
    family.add_metric(labels, counts, ns / 1e9)


def _executions(models: list[ModelReport]) -> Iterator[Metric]:
    yield _family(
        CounterMetricFamily(
            "shmserve_model_executions", "How often a model ran and answered", labels=_MODEL
        ),
        [((m.model, m.version), m.runs.executions) for m in models],
    )
    yield _family(
        CounterMetricFamily(
            "shmserve_inferences", "Elements of the batches of all executions", labels=_MODEL
        ),
        [((m.model, m.version), m.runs.inferences) for m in models],
    )
    sizes = HistogramMetricFamily(
        "shmserve_batch_size", "Elements of the batch of an execution", labels=_MODEL
    )
    for model in models:
        rows = [(size, values[0]) for size, values in model.runs.batches.items()]
        counts: list[tuple[str, float]] = [
            (f"{limit:g}", sum(n for size, n in rows if size <= limit and size != OTHER_SIZES))
            for limit in _SIZES
        ]
        counts.append(("+Inf", sum(n for _, n in rows)))
        sizes.add_metric([model.model, model.version], counts, model.runs.inferences)
    yield sizes


def _processes(report: Report) -> Iterator[Metric]:
    role = ("role",)
    for name, what, numbers in (
        ("starts", "Processes that were started", report.starts),
        ("ends", "Processes that have ended, for whatever reason", report.ends),
    ):
        yield _family(
            CounterMetricFamily(f"shmserve_process_{name}", f"{what}, by role", labels=role),
            [((of,), count) for of, count in sorted(numbers.items())],
        )
    running = Counter(process.owner.role for process in report.processes)
    yield _family(
        GaugeMetricFamily("shmserve_processes", "Processes that run, by role", labels=role),
        [((of,), count) for of, count in sorted(running.items())],
    )
    yield _family(
        GaugeMetricFamily("shmserve_connections", "Connections of clients, by role", labels=role),
        [
            ((of,), sum(p.gauges.connections for p in report.processes if p.owner.role == of))
            for of in sorted(running)
            if of == "http"  # gRPC does not tell
        ],
    )
    executors = sorted(
        (p for p in report.processes if p.owner.role == "executor"), key=lambda p: p.owner.instance
    )
    labels = [(p.owner.model, p.owner.version, p.owner.instance) for p in executors]
    yield _family(
        GaugeMetricFamily(
            "shmserve_queue_depth",
            "Requests that wait for or run on an instance",
            labels=(*_MODEL, "instance"),
        ),
        zip(labels, (p.depth for p in executors), strict=True),
    )
    yield _family(
        GaugeMetricFamily(
            "shmserve_executor_busy_seconds",
            "For how long an instance has been running its present request; 0: idle",
            labels=(*_MODEL, "instance"),
        ),
        zip(labels, (_busy_s(p) for p in executors), strict=True),
    )
    yield GaugeMetricFamily(
        "shmserve_unreadable_pages",
        "Processes whose counters could not be read for this scrape",
        value=report.unreadable,
    )


def _busy_s(process: ProcessReport) -> float:
    return max(0, monotonic_ns() - process.busy_ns) / 1e9 if process.busy_ns else 0.0


def _memory(report: Report) -> Iterator[Metric]:
    roles = sorted({process.owner.role for process in report.processes})
    for field, name, what in (
        ("slots", "shmserve_slots", "Slots of arenas in use"),
        ("slot_bytes", "shmserve_slot_bytes", "Bytes of slots in use"),
        ("arena_bytes", "shmserve_arena_bytes", "Shared memory that processes hold"),
        ("abandoned", "shmserve_abandoned_requests", "Requests whose late answers are awaited"),
    ):
        sums = [
            (
                (role,),
                sum(getattr(p.gauges, field) for p in report.processes if p.owner.role == role),
            )
            for role in roles
        ]
        yield _family(GaugeMetricFamily(name, f"{what}, by role", labels=("role",)), sums)
    yield GaugeMetricFamily(
        "shmserve_pool_bytes", "Shared memory that the service may use", value=report.pool_bytes
    )
    yield GaugeMetricFamily(
        "shmserve_pool_used_bytes", "Shared memory granted to processes", value=report.pool_used
    )
    for field, name, what in (
        ("regions", "shmserve_regions", "Regions of client memory that are registered"),
        ("nbytes", "shmserve_region_bytes", "Bytes of registered client memory"),
        ("quarantined", "shmserve_regions_quarantined", "Regions that cannot be used any more"),
    ):
        yield _family(
            GaugeMetricFamily(name, f"{what}, by kind", labels=("kind",)),
            [((of.kind,), getattr(of, field)) for of in report.regions],
        )
