"""``/metrics``: all numbers in Prometheus' text format.

The numbers come from counter pages, by way of the coordinator. No process is asked, so a stuck
process cannot delay a scrape. Metrics reported by models follow. The setting
`metrics_triton_names` adds the names used by Triton's dashboards.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from prometheus_client import core, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

import shmserve
from shmserve import build_id, waiting
from shmserve.config import Settings
from shmserve.core.registry import ModelState, Snapshot
from shmserve.core.stats.counter_pages import BOUNDS_NS, cumulated
from shmserve.core.stats.executor_counters import OTHER_SIZES, STAGES
from shmserve.core.stats.request_counters import COPIES, Reason
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.routes.scrape.custom_text import custom_text
from shmserve.frontends.http.routes.scrape.gpu_metrics import gpu_families
from shmserve.frontends.http.routes.scrape.triton_metrics import triton_text
from shmserve.frontends.presented_keys import UNKNOWN
from shmserve.frontends.shared_runs import SharedRuns
from shmserve.protocol.control.stats_messages import ModelReport, ProcessReport, Report

__all__ = ["CONTENT_TYPE", "Metrics"]

_BUILD = build_id.build_id()  # of the code that runs, also after an upgrade in place
_MODEL = ("model", "version")
_HIDDEN = "(hidden)"
_BOUNDS = [f"{ns / 1e9:g}" for ns in BOUNDS_NS] + ["+Inf"]
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Source of a scrape's answer (`text`)."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._triton_names = settings.metrics_triton_names
        self._has_cache = bool(settings.response_cache_bytes)
        self._runs = {
            hides: SharedRuns(functools.partial(self._made, hides)) for hides in (False, True)
        }

    def text(self, hide_keys: bool = False) -> bytes:
        """Return all metrics with their present values, without names of keys if `hide_keys`. Raise
        Unavailable if the coordinator is away, and did not come back in time."""
        return self._runs[hide_keys].result()

    def _made(self, hide_keys: bool) -> bytes:
        report = self._dispatcher.coordinator.report()
        if hide_keys:
            report = replace(report, keys=_without_names(report.keys))
        return waiting.beside(self._text, report, self._dispatcher.snapshot())

    def _text(self, report: Report, snapshot: Snapshot) -> bytes:
        scrape: Any = SimpleNamespace(collect=lambda: families(report, snapshot))  # a collector
        text = generate_latest(scrape) + custom_text(report, snapshot)
        return text + self._triton_text(report, snapshot) if self._triton_names else text

    def _triton_text(self, report: Report, snapshot: Snapshot) -> bytes:
        cached = {
            (name, version)
            for name, versions in snapshot.models.items()
            for version, entry in versions.items()
            if self._has_cache and entry.spec.caches_answers
        }
        return triton_text(report, cached).encode()


def _without_names(keys: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of all keys' requests together, and of requests with unknown keys."""
    unknown = keys.get(UNKNOWN, 0)
    return {_HIDDEN: sum(keys.values()) - unknown, UNKNOWN: unknown} if keys else {}


def families(report: Report, snapshot: Snapshot) -> Iterator[core.Metric]:
    """Yield all metric families with names of the server's own."""
    info = core.InfoMetricFamily("shmserve_build", "Version of the server")
    info.add_metric([], {"version": shmserve.__version__} | ({"build": _BUILD} if _BUILD else {}))
    yield info
    models = sorted(report.models, key=lambda model: (model.model, model.version))
    yield from _requests(models)
    yield from _durations(models)
    yield from _executions(models)
    yield _gauge(
        "pending_requests",
        "Requests that wait for execution",
        _MODEL,
        sorted(report.pending().items()),
    )
    yield _counter(
        "key_requests",
        "Requests with a key, by the key's name",
        ("key",),
        [((name,), count) for name, count in sorted(report.keys.items())],
    )
    yield from _processes(report)
    yield from _usage(report)
    yield from _memory(report)
    yield from gpu_families(report.gpus)
    states = Counter(
        entry.state.value for versions in snapshot.models.values() for entry in versions.values()
    )
    yield _gauge(
        "models",
        "Model versions by state",
        ("state",),
        [((state.value,), states[state.value]) for state in ModelState],
    )


def _family(
    kind: type[core.CounterMetricFamily | core.GaugeMetricFamily],
    name: str,
    what: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> core.Metric:
    family = kind(f"shmserve_{name}", what, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


_gauge = functools.partial(_family, core.GaugeMetricFamily)
_counter = functools.partial(_family, core.CounterMetricFamily)


def _requests(models: list[ModelReport]) -> Iterator[core.Metric]:
    counts = [
        ((model.model, model.version, protocol), counts)
        for model in models
        for protocol, counts in sorted(model.requests.items())
    ]
    yield _counter(
        "requests",
        "Inference requests to ready models, counted at their end",
        (*_MODEL, "protocol"),
        [(labels, c.requests) for labels, c in counts],
    )
    yield _counter(
        "request_failures",
        "Inference requests that failed, by reason",
        (*_MODEL, "protocol", "reason"),
        [
            ((*labels, reason.name.lower()), c.failures[reason])
            for labels, c in counts
            for reason in Reason
        ],
    )
    yield _counter(
        "cache_lookups",
        "Lookups in the response cache, by result",
        (*_MODEL, "result"),
        [
            ((model.model, model.version, result), model.all_requests().cache[index])
            for model in models
            for index, result in ((0, "hit"), (2, "miss"))
        ],
    )
    yield _counter(
        "copied_bytes",
        "Bytes of tensors copied in user space, by stage",
        (*_MODEL, "stage"),
        [
            ((model.model, model.version, stage), model.all_requests().copied[index])
            for model in models
            for index, stage in enumerate(COPIES)
        ],
    )


def _durations(models: list[ModelReport]) -> Iterator[core.Metric]:
    whole = core.HistogramMetricFamily(
        "shmserve_request_duration_seconds",
        "Time of answered requests from arrival to an answer ready to send",
        labels=_MODEL,
    )
    stages = core.HistogramMetricFamily(
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


def _observe(
    family: core.HistogramMetricFamily, labels: list[str], buckets: list[int], ns: int
) -> None:
    counts = list(zip(_BOUNDS, cumulated(buckets), strict=True))
    family.add_metric(labels, counts, ns / 1e9)


def _executions(models: list[ModelReport]) -> Iterator[core.Metric]:
    all_runs = [((model.model, model.version), model.all_runs()) for model in models]
    for name, what, field in (
        ("model_executions", "Executions of a model", "executions"),
        ("inferences", "Elements of the batches of all executions", "inferences"),
    ):
        rows = [(labels, getattr(runs, field)) for labels, runs in all_runs]
        yield _counter(name, what, _MODEL, rows)
    sizes = core.HistogramMetricFamily(
        "shmserve_batch_size", "Elements of the batch of an execution", labels=_MODEL
    )
    for labels, runs in all_runs:
        batches = [(size, values[0]) for size, values in runs.batches.items()]
        counts: list[tuple[str, float]] = [
            (f"{limit:g}", sum(n for size, n in batches if size <= limit and size != OTHER_SIZES))
            for limit in _SIZES
        ]
        counts.append(("+Inf", sum(n for _, n in batches)))
        sizes.add_metric(labels, counts, runs.inferences)
    yield sizes


def _processes(report: Report) -> Iterator[core.Metric]:
    running = Counter(process.owner.role for process in report.processes)
    connected = _by_role(report, "connections")
    # gRPC processes do not count connections
    connections = {role: connected[role] for role in connected if role == "http"}
    for make, name, what, by_role in (
        (_counter, "process_starts", "Started processes", report.starts),
        (_counter, "process_ends", "Ended processes, for any reason", report.ends),
        (_gauge, "processes", "Running processes", running),
        (_gauge, "connections", "Connections of clients", connections),
    ):
        rows = [((role,), count) for role, count in sorted(by_role.items())]
        yield make(name, f"{what}, by role", ("role",), rows)
    executors = sorted(
        (p for p in report.processes if p.owner.role == "executor"), key=lambda p: p.owner.instance
    )
    labels = [(p.owner.model, p.owner.version, p.owner.instance) for p in executors]
    yield _gauge(
        "queue_depth",
        "Requests that wait for or run on an instance",
        (*_MODEL, "instance"),
        zip(labels, (p.depth for p in executors), strict=True),
    )
    yield _gauge(
        "executor_busy_seconds",
        "Time since an instance began its current request; 0 if idle",
        (*_MODEL, "instance"),
        zip(labels, (_busy_s(p) for p in executors), strict=True),
    )
    yield core.GaugeMetricFamily(
        "shmserve_unreadable_pages",
        "Processes whose counters could not be read for this scrape",
        value=report.unreadable,
    )


def _by_role(report: Report, gauge: str) -> Counter[str]:
    """Return the sum of a gauge over all processes, for each role with processes."""
    totals: Counter[str] = Counter()
    for process in report.processes:
        totals[process.owner.role] += getattr(process.gauges, gauge)
    return totals


def _busy_s(process: ProcessReport) -> float:
    return max(0, monotonic_ns() - process.busy_ns) / 1e9 if process.busy_ns else 0.0


def _usage(report: Report) -> Iterator[core.Metric]:
    """Yield processor time and memory, by role and by model."""
    for subject, of, labels in (
        ("process", "processes, by role", ("role",)),
        ("model", "a model's executors", _MODEL),
    ):
        for field, make, name, what in (
            ("cpu_s", _counter, "cpu_seconds", "Processor time since the start of the coordinator"),
            ("private", _gauge, "private_bytes", "Memory without shared memory"),
            ("resident", _gauge, "resident_bytes", "Memory with shared memory"),
        ):
            totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
            for use in report.usage:
                if use.model or labels != _MODEL:
                    key = tuple(getattr(use, label) for label in labels)
                    totals[key] += getattr(use, field)
            yield make(f"{subject}_{name}", f"{what} of {of}", labels, sorted(totals.items()))


def _memory(report: Report) -> Iterator[core.Metric]:
    for field, name, what in (
        ("slots", "slots", "Slots of arenas in use"),
        ("slot_bytes", "slot_bytes", "Bytes of slots in use"),
        ("arena_bytes", "arena_bytes", "Shared memory that processes hold"),
        ("cache_bytes", "cache_bytes", "Bytes of answers in the response cache"),
        (
            "abandoned",
            "abandoned_requests",
            "Abandoned requests whose late answers are still to come",
        ),
    ):
        rows = [((role,), total) for role, total in sorted(_by_role(report, field).items())]
        yield _gauge(name, f"{what}, by role", ("role",), rows)
    yield core.GaugeMetricFamily(
        "shmserve_pool_bytes", "Shared memory that the service may use", value=report.pool_bytes
    )
    yield core.GaugeMetricFamily(
        "shmserve_pool_used_bytes", "Shared memory granted to processes", value=report.pool_used
    )
    for field, name, what in (
        ("regions", "regions", "Registered regions of client memory"),
        ("nbytes", "region_bytes", "Bytes of registered client memory"),
        (
            "quarantined",
            "regions_quarantined",
            "Regions out of use, because their memory was truncated",
        ),
    ):
        rows = [((region.kind,), getattr(region, field)) for region in report.regions]
        yield _gauge(name, f"{what}, by kind", ("kind",), rows)
