"""Statistics extension: counts and times of every model version, in Triton's form.

docs/statistics.md explains the fields.
"""

from typing import Any

from shmserve.core.registry import ModelEntry, ModelState
from shmserve.core.stats.executor_counters import OTHER_SIZES, RESPONSE, STAGES, ExecutorCounts
from shmserve.errors import NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.stats_messages import ModelReport, Report


class Statistics:
    def __init__(self, dispatcher: DispatchApi) -> None:
        self._dispatcher = dispatcher

    def models(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return `model_stats` of all ready versions, of the ready versions of a model, or of a
        single version. Raise NotFound if there is no such model or version, or the model is not
        ready. Raise Unavailable if the coordinator cannot deliver the numbers now."""
        entries = self._entries(name, version)
        report = self._dispatcher.coordinator.report()
        reports = {(m.model, m.version): m for m in report.models}
        return [
            _statistics(reports.get(key) or ModelReport(*key), report)
            for key in ((entry.spec.name, entry.spec.version) for entry in entries)
        ]

    def _entries(self, name: str, version: str) -> list[ModelEntry]:
        snapshot = self._dispatcher.snapshot()
        models = snapshot.models
        ready = [
            entry
            for model, versions in models.items()
            for number, entry in versions.items()
            if entry.state is ModelState.READY
            and (not name or model == name)
            and (not version or number == version)
        ]
        if name and not ready:
            snapshot.require_complete(f"model '{name}'")
            if version and models.get(name):
                raise NotFound(f"requested version {version} of model '{name}' is not available")
            raise NotFound(f"requested model '{name}' is not available")
        return sorted(ready, key=lambda entry: (entry.spec.name, int(entry.spec.version)))


def _statistics(model: ModelReport, report: Report) -> dict[str, Any]:
    """Return the statistics of one version."""
    requests, runs = model.all_requests(), model.all_runs()
    stages = dict(zip(STAGES, (_duration(runs.requests, ns) for ns in runs.stage_ns), strict=True))
    return {
        "name": model.model,
        "version": model.version,
        "last_inference": runs.last_inference_ms,
        "inference_count": runs.inferences,
        "execution_count": runs.executions,
        "inference_stats": {
            "success": _duration(requests.succeeded, requests.success_ns),
            "fail": _duration(requests.failed, requests.fail_ns),
            **stages,
            "cache_hit": _duration(*requests.cache[:2]),
            "cache_miss": _duration(*requests.cache[2:]),
        },
        "response_stats": _responses(runs),
        "batch_stats": _batches(runs),
        "memory_usage": _memory(model, report),
    }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def _batches(runs: ExecutorCounts) -> list[dict[str, Any]]:
    return [
        {
            "batch_size": size,
            "compute_input": _duration(values[0], values[1]),
            "compute_infer": _duration(values[0], values[2]),
            "compute_output": _duration(values[0], values[3]),
        }
        for size, values in sorted(runs.batches.items())
        if size != OTHER_SIZES
    ]


def _responses(runs: ExecutorCounts) -> dict[str, Any]:
    return {
        str(index): {
            name: _duration(values[2 * at], values[2 * at + 1]) for at, name in enumerate(RESPONSE)
        }
        for index, values in sorted(runs.responses.items())
    }


def _memory(model: ModelReport, report: Report) -> list[dict[str, Any]]:
    """Return the shared memory, in bytes, held for outputs by the version's executors."""
    nbytes = sum(
        process.gauges.arena_bytes
        for process in report.processes
        if (process.owner.model, process.owner.version) == (model.model, model.version)
    )
    return [{"type": "CPU", "id": 0, "byte_size": nbytes}] if nbytes else []
