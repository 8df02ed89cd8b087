"""Answers to ``shmserve show``: own knowledge at once, others' numbers within a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from shmserve.core.control.reconciler import Fleet
from shmserve.core.control.records import UNLOADED, Incarnation, ModelRecord, refused
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.stats.executor_counters import STAGES
from shmserve.core.stats.request_counters import Reason
from shmserve.protocol.control.link_messages import AskStats, Shown
from shmserve.protocol.control.stats_messages import GpuReport, ModelReport, Report
from shmserve.protocol.messages import FromCoordinator

Row = dict[str, Any]
ASKED = ("segments", "slots", "queues", "monitor")  # what the processes are asked for
_COLUMNS = {  # of answers that come as lists
    "segments": ("segment", "bytes"),
    "slots": ("slot", "generation", "state", "leases", "segment", "offset", "bytes"),
    "queues": ("instance", "in_flight"),
}
_WAIT_S = 1.0
_PART_BYTES = 64 * 1024  # rows per message, well below what a packet carries


def process_rows(fleet: Fleet, now: float, own: tuple[str, int, float]) -> list[Row]:
    """One row a process; `own` is the coordinator's (process id, pid, start)."""
    name, pid, since = own
    rows = [_process_row("coordinator", name, pid, now - since, 0, "")]
    rows += [
        _process_row(p.role, p.name, p.pid, now - p.since, fleet.ledger.held(p.name), p.instance)
        for p in sorted(fleet.processes.values(), key=lambda p: (p.role, p.name))
    ]
    return rows


def _process_row(role: str, name: str, pid: int, up_s: float, held: int, instance: str) -> Row:
    return {
        "role": role,
        "process": name,
        "pid": pid,
        "up_s": round(up_s, 1),
        "held_bytes": held,
        "instance": instance,
    }


def model_rows(fleet: Fleet) -> list[Row]:
    """One row an instance, and one for each model without any."""
    rows: list[Row] = []
    for name, model in sorted(fleet.models.by_name.items()):
        for incarnation in model.incarnations():
            for version in incarnation.versions:
                serving = incarnation is model.serving
                state = (
                    version.entry().state.value
                    if serving
                    else incarnation_state(model, incarnation)
                )
                number = version.spec.version
                rows += [
                    _model_row(name, number, state, r.reason, r.name, r.state.value, r.pid, r.exits)
                    for r in version.instances
                ]
        if model.serving is None:
            rows += [_model_row(name, number, "UNAVAILABLE", UNLOADED) for number in model.unloaded]
    rows += [
        _model_row(name, "", "UNAVAILABLE", reason)
        for name, reason in sorted(
            {**refused(fleet.models.by_name.values()), **fleet.failures}.items()
        )
    ]
    return rows


def incarnation_state(model: ModelRecord, incarnation: Incarnation) -> str:
    """Of one that does not serve."""
    return "LOADING" if incarnation is model.coming else "UNLOADING"


def region_rows(book: RegionBook) -> list[Row]:
    """One row a region of client memory."""
    return [
        {
            "region": region.name,
            "number": region.number,
            "kind": region.kind,
            "key": region.key,
            "offset": region.offset,
            "bytes": region.byte_size,
            "device": f"cuda:{region.device_id}" if region.cuda else "",
            "uid": region.uid,
            "pid": region.pid,
            "copy": region.copy,
            "sealed": region.sealed,
            "quarantined": region.quarantined,
        }
        for region in sorted(book.regions.values(), key=lambda r: (r.uid, r.name))
    ]


def gpu_rows(gpus: tuple[GpuReport, ...]) -> list[Row]:
    """One row a GPU; a value that it does not have is left out."""
    rows = [
        {
            "gpu": gpu.index,
            "name": gpu.name,
            "utilization": gpu.utilization,
            "memory_used_bytes": gpu.memory_used,
            "memory_total_bytes": gpu.memory_total,
            "temperature_celsius": gpu.temperature,
            "power_watts": gpu.power,
            "power_limit_watts": gpu.power_limit,
            "energy_joules": gpu.energy,
            "uuid": gpu.uuid,
        }
        for gpu in gpus
    ]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def stats_rows(report: Report) -> list[Row]:
    """One row a model version: what became of its requests, and mean times in milliseconds."""
    found = sorted(report.models, key=lambda model: (model.model, model.version))
    return [_stats_row(model) for model in found]


def _stats_row(model: ModelReport) -> Row:
    requests, runs = model.all_requests(), model.runs
    row: Row = {
        "model": model.model,
        "version": model.version,
        "answered": requests.succeeded,
        "failed": requests.failed,
        "refused": requests.failures[Reason.BAD_REQUEST],
        "executions": runs.executions,
        "inferences": runs.inferences,
        "request_ms": _mean_ms(requests.success_ns, requests.succeeded),
    }
    for stage, ns in zip(STAGES, runs.stage_ns, strict=True):
        row[f"{stage}_ms"] = _mean_ms(ns, runs.requests)
    return row


def _mean_ms(ns: int, count: int) -> float:
    return round(ns / count / 1e6, 3) if count else 0.0


def _model_row(
    model: str,
    version: str,
    state: str,
    reason: str,
    instance: str = "",
    instance_state: str = "",
    pid: int = 0,
    exits: int = 0,
) -> Row:
    return {
        "model": model,
        "version": version,
        "state": state,
        "instance": instance,
        "instance_state": instance_state,
        "pid": pid,
        "exits": exits,
        "reason": reason,
    }


def parts(ticket: int, rows: Iterable[Row]) -> Iterator[Shown]:
    """The rows in messages that fit a packet each."""
    part: list[Row] = []
    size = 0
    for row in rows:
        nbytes = len(msgspec.msgpack.encode(row))
        if nbytes > _PART_BYTES:
            continue
        if part and size + nbytes > _PART_BYTES:
            yield Shown(ticket, tuple(part), more=True)
            part, size = [], 0
        part.append(row)
        size += nbytes
    yield Shown(ticket, tuple(part))


def _rows(what: str, stats: dict[str, Any]) -> list[Row]:
    """What a process says under `what` as rows, or all its single numbers as one row."""
    answer = stats.get(what)
    if isinstance(answer, list):
        return [
            dict(zip(_COLUMNS[what], row, strict=False)) if isinstance(row, list) else row
            for row in answer
            if isinstance(row, list | dict)
        ]
    if isinstance(answer, dict):  # of a frontend: instance -> requests on their way
        return [{"instance": name, "in_flight": n} for name, n in sorted(answer.items())]
    if what == "monitor":  # which models alone have
        return []
    scalars = {key: value for key, value in stats.items() if isinstance(value, int | float | str)}
    return [scalars] if scalars else []


class Questions:
    """Questions to all processes that are being answered, each with a deadline."""

    def __init__(self, send: Callable[[str, FromCoordinator], None]) -> None:
        self._send = send
        self._open: dict[int, _Question] = {}
        self._next = 1  # 0 is the watchdog's

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, asker: str, ticket: int, what: str, of: Iterable[str], now: float) -> None:
        """Ask processes on behalf of `asker`; at most 16 questions are open."""
        if len(self._open) >= 16:
            self._send(asker, Shown(ticket, (), "too many questions at once"))
            return
        number, self._next = self._next, self._next + 1
        awaited = set(of) - {asker}
        self._open[number] = _Question(asker, ticket, what, awaited, now + _WAIT_S)
        for process in sorted(awaited):
            self._send(process, AskStats(number, what))
        self._finish(now)

    def answered(self, process: str, number: int, stats: dict[str, Any], now: float) -> None:
        """A process's numbers, which become rows."""
        question = self._open.get(number)
        if question is None or process not in question.awaited:
            return  # late: the question has been closed
        question.awaited.discard(process)
        question.rows += [{"process": process, **row} for row in _rows(question.what, stats)]
        self._finish(now)

    def gone(self, process: str, now: float) -> None:
        for question in self._open.values():
            question.awaited.discard(process)
        self._finish(now)

    def tick(self, now: float) -> None:
        self._finish(now)

    def _finish(self, now: float) -> None:
        for number, question in list(self._open.items()):
            if question.awaited and now < question.deadline:
                continue
            if self._open.pop(number, None) is None:
                continue
            missing = [{"process": p, "error": "no answer"} for p in sorted(question.awaited)]
            for shown in parts(question.ticket, question.rows + missing):
                self._send(question.asker, shown)


class _Question:
    """One question, who asked it, and who has not answered yet."""

    __slots__ = ("asker", "awaited", "deadline", "rows", "ticket", "what")

    def __init__(
        self, asker: str, ticket: int, what: str, awaited: set[str], deadline: float
    ) -> None:
        self.asker = asker
        self.ticket = ticket
        self.what = what
        self.awaited = awaited
        self.deadline = deadline
        self.rows: list[Row] = []
