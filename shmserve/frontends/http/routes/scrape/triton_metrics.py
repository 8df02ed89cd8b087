"""Metrics under the names used by Triton's dashboards.

The lines are written here: prometheus_client would append ``_total`` to counters, and Triton's
counters have no such ending.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from shmserve.core.stats.executor_counters import STAGES
from shmserve.core.stats.request_counters import Reason
from shmserve.frontends.http.routes.scrape.custom_text import escaped
from shmserve.frontends.http.routes.scrape.gpu_metrics import triton_gpu_lines
from shmserve.protocol.control.stats_messages import ModelReport, Report

# Triton's reason -> reasons of this server. Triton does not count requests refused before
# queueing.
_REASONS = {
    "REJECTED": (Reason.QUEUE_FULL, Reason.NO_MEMORY, Reason.DEADLINE),
    "CANCELED": (Reason.CANCELLED,),
    "BACKEND": (Reason.MODEL, Reason.EXECUTOR_DIED),
    "OTHER": (Reason.NO_EXECUTOR, Reason.INTERNAL),
}
Value = Callable[[ModelReport], float]


def _stage_us(index: int) -> Value:
    return lambda model: model.runs.stage_ns[index] // 1000


def _cache(index: int, unit: int) -> Value:
    return lambda model: model.all_requests().cache[index] // unit


_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("nv_inference_request_success", "Answered requests", lambda m: m.all_requests().succeeded),
    (
        "nv_inference_count",
        "Elements of the batches of all executions",
        lambda m: m.runs.inferences,
    ),
    ("nv_inference_exec_count", "Executions of the model", lambda m: m.runs.executions),
    (
        "nv_inference_request_duration_us",
        "Microseconds from arrival to answer",
        lambda m: m.all_requests().success_ns // 1000,
    ),
    *(
        (f"nv_inference_{stage}_duration_us", f"Microseconds in stage {stage}", _stage_us(index))
        for index, stage in enumerate(STAGES)
    ),
)
_CACHE_COUNTERS: tuple[tuple[str, str, Value], ...] = tuple(
    (f"nv_cache_{name}_per_model", what, _cache(index, unit))
    for name, what, index, unit in (
        ("num_hits", "Requests answered from the response cache", 0, 1),
        ("num_misses", "Requests without an answer in the response cache", 2, 1),
        ("hit_duration", "Microseconds of hits", 1, 1000),
        ("miss_duration", "Microseconds of misses", 3, 1000),
    )
)


def triton_text(report: Report, cached: Collection[tuple[str, str]]) -> str:
    """Return the lines to add to a scrape's answer. `cached`: versions of models whose answers are
    cached."""
    return "".join(f"{line}\n" for line in _lines(report, cached))


def _lines(report: Report, cached: Collection[tuple[str, str]]) -> Iterator[str]:
    models = sorted(
        (replace(model, runs=model.all_runs()) for model in report.models),
        key=lambda model: (model.model, model.version),
    )
    yield from _counters(_COUNTERS, models)
    with_cache = [model for model in models if (model.model, model.version) in cached]
    if with_cache:
        yield from _counters(_CACHE_COUNTERS, with_cache)
    name = "nv_inference_request_failure"
    yield from _head(name, "Failed requests")
    for model in models:
        counts = model.all_requests().failures
        for reason, ours in _REASONS.items():
            failed = sum(counts[each] for each in ours)
            yield f"{name}{{{_labels(model, reason)}}} {failed}"
    name = "nv_inference_pending_request_count"
    yield from _head(name, "Requests that wait for execution", "gauge")
    pending = report.pending()
    for model in models:
        yield f"{name}{{{_labels(model)}}} {pending[model.model, model.version]}"
    yield from triton_gpu_lines(report.gpus)


def _counters(
    counters: Iterable[tuple[str, str, Value]], models: Sequence[ModelReport]
) -> Iterator[str]:
    for name, what, value in counters:
        yield from _head(name, what)
        for model in models:
            yield f"{name}{{{_labels(model)}}} {value(model)}"


def _head(name: str, what: str, kind: str = "counter") -> tuple[str, str]:
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _labels(model: ModelReport, reason: str = "") -> str:
    """Return the labels in Triton's order, by name: some tools compare whole lines."""
    between = f',reason="{reason}"' if reason else ""
    return f'model="{escaped(model.model)}"{between},version="{escaped(model.version)}"'
