"""Data of the metrics page: the coordinator's history and the registry as plain values."""

import time
from typing import Any

import msgspec

import shmserve
from shmserve.config import Settings
from shmserve.core.registry import ModelState, Snapshot
from shmserve.core.stats.counter_pages import BOUNDS_NS
from shmserve.core.stats.incidents import Incident
from shmserve.core.stats.request_counters import HITS, MISSES
from shmserve.core.stats.time_series import LEVELS
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.history_messages import HistoryReport
from shmserve.protocol.control.stats_messages import Report

_BOUNDS_MS = [ns / 1e6 for ns in BOUNDS_NS]
_LEVELS = {level.name: number for number, level in enumerate(LEVELS)}
_COPIED_FIELDS = (
    *("life", "first", "until", "running", "ended_at", "age_s"),
    *("total", "system", "machine_bytes", "processors"),
)
_NO_REPORT = Report((), (), {}, {})


class DashboardData:
    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._server = {"name": settings.server_name, "version": shmserve.__version__}

    def data(
        self, level: str = "second", since: int = 0, life: str = "", said: bool = False
    ) -> dict[str, Any]:
        """Return all series of one level, and the present state of the service.

        Args:
            level: second, minute, hour or day.
            since: number of the first period to return. Use `until` of an earlier answer to get
                only periods that had not ended at the time of that answer.
            life: `life` of the same earlier answer.
            said: whether to add the error texts that clients of failed requests received.

        Raises:
            InvalidArgument: there is no such level.
            Unavailable: the coordinator is away, and did not come back in time.
        """
        if level not in _LEVELS:
            raise InvalidArgument(f"level '{level}' is none of {', '.join(_LEVELS)}")
        number = _LEVELS[level]
        history = self._dispatcher.coordinator.history(number, since, life)
        snapshot = self._snapshot()
        report = history.report or _NO_REPORT
        return {
            "server": {**self._server, "state": _state(snapshot)},
            "now": time.time(),
            "level": level,
            "seconds": LEVELS[number].seconds,
            "points": LEVELS[number].points,
            "bounds_ms": _BOUNDS_MS,
            **{name: getattr(history, name) for name in _COPIED_FIELDS},
            "models": _models(history, snapshot, report),
            "values": [
                {
                    "model": value.model,
                    "version": value.version,
                    "name": value.name,
                    "kind": value.kind,
                    "series": value.columns,
                }
                for value in history.values
            ],
            "gpus": _gpus(history, report),
            "processes": [msgspec.structs.asdict(process) for process in history.processes],
            "starts": report.starts,
            "ends": report.ends,
            "regions": [msgspec.structs.asdict(kind) for kind in report.regions],
            "pool_bytes": report.pool_bytes,
            "resources": [msgspec.structs.asdict(use) for use in report.resources],
            "cache_bytes": sum(process.gauges.cache_bytes for process in report.processes),
            "troubles": [_trouble(entry, said) for entry in reversed(history.incidents)],
        }

    def _snapshot(self) -> Snapshot | None:
        try:
            return self._dispatcher.snapshot()
        except Unavailable:
            return None


def _state(snapshot: Snapshot | None) -> str:
    if snapshot is None or not snapshot.complete:
        return "starting"
    if snapshot.draining:
        return "draining"
    return "ready" if snapshot.ready else "not ready"


def _models(
    history: HistoryReport, snapshot: Snapshot | None, report: Report
) -> list[dict[str, Any]]:
    """Return a row for every published model version, and every other with counted requests."""
    series = {(model.model, model.version): model for model in history.models}
    totals = {(model.model, model.version): model.all_requests() for model in report.models}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for key in series:
        rows[key] = _row(*key, "UNLOADED", "", 0)
    if snapshot is not None:
        for name, reason in {**snapshot.failed, **snapshot.refused}.items():
            model, _, version = name.partition("/")
            rows[model, version] = _row(model, version, ModelState.UNAVAILABLE, reason, 0)
        for name, versions in snapshot.models.items():
            for version, entry in versions.items():
                # an ensemble lists the instances of its steps
                instances = None if entry.spec.steps else len(entry.instances)
                rows[name, version] = _row(name, version, entry.state, entry.reason, instances)
    for key, row in rows.items():
        counts, model_series = totals.get(key), series.get(key)
        row["requests"] = counts.requests if counts is not None else 0
        row["cache_hits"] = counts.cache[HITS] if counts is not None else 0
        row["cache_misses"] = counts.cache[MISSES] if counts is not None else 0
        row["failed"] = sum(counts.failures) if counts is not None else 0
        row["series"] = model_series.columns if model_series is not None else {}
    return [rows[key] for key in sorted(rows)]


def _trouble(entry: Incident, said: bool) -> dict[str, Any]:
    row = msgspec.structs.asdict(entry)
    if not said:
        del row["said"]
    return row


def _gpus(history: HistoryReport, report: Report) -> list[dict[str, Any]]:
    """Return a row for every GPU in the history. Memory size and power limit are None while the
    GPU does not answer."""
    now = {gpu.uuid: gpu for gpu in report.gpus}
    return [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "memory_total": now[gpu.uuid].memory_total if gpu.uuid in now else None,
            "power_limit": now[gpu.uuid].power_limit if gpu.uuid in now else None,
            "series": gpu.columns,
        }
        for gpu in history.gpus
    ]


def _row(name: str, version: str, state: str, reason: str, instances: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "state": str(state),
        "reason": reason,
        "instances": instances,
    }
