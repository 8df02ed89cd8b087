"""Admin tables for ``shmserve show``: the coordinator's own rows at once, rows of other processes
within a second."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from shmserve.core.control import compositions
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import UNLOADED, ProcessRecord, refused
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.scheduling.rate_limiter import ResourceUse
from shmserve.core.stats.executor_counters import STAGES
from shmserve.core.stats.request_counters import Reason
from shmserve.protocol.control.link_messages import AskStats, Shown
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.stats_messages import GpuReport, ModelReport, Report

Row = dict[str, Any]
# tables for which other processes are asked
ASKED = ("segments", "slots", "queues", "cache", "monitor")
_COLUMNS = {  # columns of answers that are lists
    "segments": ("segment", "bytes"),
    "slots": ("slot", "generation", "state", "leases", "segment", "offset", "bytes"),
    "queues": ("instance", "in_flight"),
}
_WAIT_S = 1.0
_PART_BYTES = 64 * 1024  # rows in one message, well below the size of a packet


class OwnProcess(NamedTuple):
    """The coordinator process: process id, pid and monotonic start time in seconds."""

    name: str
    pid: int
    since: float


def process_rows(reconciler: Reconciler, now: float, own: OwnProcess) -> list[Row]:
    """Return one row for each process. `own`: the coordinator."""
    coordinator = ProcessRecord(own.name, "coordinator", own.pid, own.since)
    linked = sorted(reconciler.processes.values(), key=lambda p: (p.role, p.name))
    return [
        {
            "role": process.role,
            "process": process.name,
            "pid": process.pid,
            "up_s": round(now - process.since, 1),
            "held_bytes": reconciler.ledger.held(process.name),
            "instance": process.instance,
        }
        for process in [coordinator, *linked]
    ]


def model_rows(
    reconciler: Reconciler, rates: Mapping[tuple[str, str], float], threads: Mapping[str, int]
) -> list[Row]:
    """Return one row for each instance, and one for each model without instances. `rates`:
    requests per second of each model version, over all instances. `threads`: threads on which a
    process runs its model; 0: the backend does not choose."""
    rows: list[_ModelRow] = []
    published = compositions.compose(reconciler.models.entries())
    for name, model in sorted(reconciler.models.by_name.items()):
        for revision in model.revisions():
            for version in revision.versions:
                serving = revision is model.serving
                changing = "LOADING" if revision is model.coming else "UNLOADING"
                state = version.entry().state.value if serving else changing
                number, note = version.spec.version, version.spec.batch_note
                rows += [
                    _ModelRow(
                        *(name, number, state, r.name, r.state.value, r.pid),
                        *(threads.get(r.process, 0), r.exits, r.reason, note),
                    )
                    for r in version.instances
                ]
                if version.spec.steps and serving:
                    entry = published[name][number]
                    rows.append(_ModelRow(name, number, entry.state.value, reason=entry.reason))
        if model.serving is None:
            rows += [_ModelRow(name, v, "UNAVAILABLE", reason=UNLOADED) for v in model.unloaded]
    unserved = {**refused(reconciler.models.by_name.values()), **reconciler.failures}
    rows += [_ModelRow(n, "", "UNAVAILABLE", reason=why) for n, why in sorted(unserved.items())]
    return [
        {**asdict(row), "per_s": round(rates.get((row.model, row.version), 0.0), 1)} for row in rows
    ]


class _ModelRow(Struct):
    """Row of a model, with keys in display order."""

    model: str
    version: str
    state: str
    instance: str = ""
    instance_state: str = ""
    pid: int = 0
    threads: int = 0
    exits: int = 0
    reason: str = ""
    note: str = ""


def region_rows(book: RegionBook) -> list[Row]:
    """Return one row for each region of client memory."""
    return [
        {
            "region": region.name,
            "number": region.number,
            "kind": region.kind,
            "key": region.key,
            "offset": region.offset,
            "bytes": region.byte_size,
            "device": region.on_device,
            "uid": region.uid,
            "pid": region.pid,
            "copy": region.copy,
            "sealed": region.sealed,
            "quarantined": region.quarantined,
        }
        for region in sorted(book.regions.values(), key=lambda r: (r.uid, r.name))
    ]


def resource_rows(uses: Iterable[ResourceUse]) -> list[Row]:
    """Return one row for each resource of the rate limiter. Waiting instances are listed in the
    order of turns."""
    return [
        {
            "resource": use.name,
            "device": use.device,
            "count": use.count,
            "held": use.held,
            "holders": " ".join(use.holders),
            "waiting": " ".join(use.waiting),
        }
        for use in uses
    ]


def gpu_rows(gpus: tuple[GpuReport, ...]) -> list[Row]:
    """Return one row for each GPU. Values that the GPU does not report are left out."""
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
    """Return one row for each model version: outcomes of requests, and mean times in
    milliseconds."""
    return [_stats_row(m) for m in sorted(report.models, key=lambda m: (m.model, m.version))]


def _stats_row(model: ModelReport) -> Row:
    requests, runs = model.all_requests(), model.all_runs()
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


def parts(ticket: int, rows: Iterable[Row]) -> Iterator[Shown]:
    """Yield the rows in messages that fit a packet each."""
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
    """Return a process's answer under `what` as rows. If `what` is missing, return all scalar
    numbers as one row."""
    answer = stats.get(what)
    if isinstance(answer, list):
        return [
            dict(zip(_COLUMNS[what], row, strict=False)) if isinstance(row, list) else row
            for row in answer
            if isinstance(row, list | dict)
        ]
    if isinstance(answer, dict):  # a frontend's in-flight requests by instance
        return [{"instance": name, "in_flight": n} for name, n in sorted(answer.items())]
    if what in ("monitor", "cache"):  # not every process has these tables
        return []
    scalars = {key: value for key, value in stats.items() if isinstance(value, int | float | str)}
    return [scalars] if scalars else []


class TableQueries:
    """Open questions to all processes, each with a deadline."""

    def __init__(self, send: Callable[[str, FromCoordinator], None]) -> None:
        self._send = send
        self._open: dict[int, _TableQuery] = {}
        self._next = 1  # 0 is the watchdog's ticket

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, asker: str, ticket: int, what: str, names: Iterable[str], now: float) -> None:
        """Ask processes on behalf of `asker`. At most 16 questions may be open."""
        if len(self._open) >= 16:
            self._send(asker, Shown(ticket, (), "too many questions at once"))
            return
        number, self._next = self._next, self._next + 1
        awaited = set(names) - {asker}
        self._open[number] = _TableQuery(asker, ticket, what, awaited, now + _WAIT_S)
        for process in sorted(awaited):
            self._send(process, AskStats(number, what))
        self._finish(now)

    def answered(self, process: str, number: int, stats: dict[str, Any], now: float) -> None:
        """Add a process's numbers to a question as rows."""
        question = self._open.get(number)
        if question is None or process not in question.awaited:
            return  # too late: the question has been closed
        question.awaited.discard(process)
        question.rows.extend({"process": process, **row} for row in _rows(question.what, stats))
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


class _TableQuery(Struct):
    """Open question to processes. `awaited`: processes without an answer so far."""

    asker: str
    ticket: int
    what: str
    awaited: set[str]
    deadline: float
    rows: list[Row] = []
