"""Counter totals: reads and sums the counters of all processes, including ended processes.

Each counting process sends a descriptor of its counter page after Welcome. The supervisor keeps a
copy for the coordinator's successor. When a process has ended, its page is added to the totals.
The totals are written to a file before the page is released. The file names all pages added, so no
page is added twice even if coordinators die in between.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.core.control.reconciler import Reconciler
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.stats import executor_counters, request_counters
from shmserve.core.stats.counter_pages import (
    OLDEST_RUN_WORD,
    UNCOUNTED_WORD,
    Gauges,
    Words,
    read_gauges,
)
from shmserve.core.stats.custom_metrics import InstanceMetrics
from shmserve.core.stats.request_counters import OTHER_KEYS
from shmserve.errors import UnreadableMessage
from shmserve.protocol.control import stats_messages as wire
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm import counter_page, metrics_area
from shmserve.shm.replaced_file import ReplacedFile
from shmserve.shm.status_page import BUSY_SINCE, COUNTERS, DEPTH, RUNNING, THREADS, VALUES
from shmserve.transport import rundir
from shmserve.transport.channel import close_all
from shmserve.transport.processes import has_ended, pidfd_open

# Seconds after a restart for the supervisor to hand back pages. Handing back takes a moment; only
# a supervisor that hangs needs so long. No answer is better than counters that seem to restart.
SETTLE_S = 30.0
_JUST_S = 0.2  # seconds for which a reading is fresh
_REMEMBERED = 1024  # names of pages added lately
LANES = "-lanes"  # suffix of the executor's name, for the page of its lanes

Send = Callable[..., None]  # arguments: process, message, descriptors
Served = Callable[[str, str], bool]  # returns True if a model version is still served
Gpus = tuple[wire.GpuReport, ...]


class Totals(Struct):
    """Counts of ended processes. `added`: names of the pages included lately."""

    epoch: str
    models: list[wire.ModelReport] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)


_decode = msgpack_decoder(Totals)


class CounterReading(Struct):
    """Contents of one page: rows of a frontend, or runs of an executor with the number of values
    reported by its model. An unchanged page gives the identical object again. `oldest_run_ns`:
    start of the frontend's oldest run of an ensemble (CLOCK_MONOTONIC); 0 without runs. `threads`:
    threads on which the executor's backend runs the model; 0: the backend does not choose."""

    owner: wire.PageOwner
    gauges: Gauges
    rows: dict[tuple[str, str], request_counters.RequestCounts] = field(default_factory=dict)
    runs: executor_counters.ExecutorCounts | None = None
    depth: int = 0
    busy_ns: int = 0
    running: int = 0
    values: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    oldest_run_ns: int = 0
    threads: int = 0

    @property
    def report(self) -> wire.ProcessReport:
        return wire.ProcessReport(self.owner, self.gauges, self.depth, self.busy_ns, self.running)


class _Page(Struct):
    """Counter page of one process. `linked`: true while the process has a link."""

    owner: wire.PageOwner
    fd: int
    nbytes: int
    linked: bool
    data: object = None  # bytes at the last look
    reading: CounterReading | None = None


class _Sum:
    """Sum of counts: models by (name, version), and keys by name."""

    def __init__(self, models: Iterable[wire.ModelReport], keys: Mapping[str, int]) -> None:
        self.keys = Counter(keys)
        self.models = {(m.model, m.version): m for m in models}
        self.unreadable = 0

    def add(self, page: _Page) -> CounterReading | None:
        """Add a page. Return None if the page cannot be read."""
        reading = _read(page)
        if reading is None:
            self.unreadable += 1
            return None
        owner = reading.owner
        if reading.runs is not None:
            self._model(owner.model, owner.version).runs.add(reading.runs)
        for (model, version), counts in reading.rows.items():
            of_model = self._model(model, version).requests
            of_model.setdefault(owner.role, request_counters.RequestCounts()).add(counts)
        self.keys.update(reading.keys)
        return reading

    def nothing_in_flight(self, reading: CounterReading) -> None:
        """Clear the in-flight counts of an added process that has ended."""
        for model, version in reading.rows:
            self._model(model, version).requests[reading.owner.role].in_flight = 0

    def _model(self, model: str, version: str) -> wire.ModelReport:
        return self.models.setdefault((model, version), wire.ModelReport(model, version))


class CounterTotals:
    """Pages of all processes, and the totals, whose file is in `run_dir`.

    `limit`: most remembered model versions that are no longer served. `settle_until`: monotonic
    time until which, after a restart, a report may wait for pages kept by the supervisor; 0
    without an earlier coordinator.
    """

    def __init__(
        self, run_dir: str, epoch: str, send: Send, limit: int, settle_until: float = 0.0
    ) -> None:
        self._file = ReplacedFile(os.path.join(run_dir, rundir.TOTALS_FILE))
        self._send = send
        self._limit = limit
        self._settle_until = settle_until
        self._pages: dict[str, _Page] = {}
        self._read_at = -inf
        self._totals = self._load(epoch)
        self._write()  # create the file while the file system has room

    # ------------------------------------------------------------------ pages

    def arrived(
        self, owner: wire.PageOwner, message: wire.CounterPage, fds: Sequence[int], supervisor: str
    ) -> None:
        """Take in the page of a linked process."""
        # an executor's second page counts its lanes
        if owner.role == "executor" and not owner.model:
            owner = replace(owner, process=owner.process + LANES, role="lane")
        known = self._pages.get(owner.process)
        if len(fds) != 1 or known is not None:  # relinked: the page is known already
            close_all(fds)
            if known is not None:
                known.linked = True
            return
        self._pages[owner.process] = _Page(owner, fds[0], message.nbytes, True)
        if supervisor:
            self._send(supervisor, wire.StorePages((owner,)), (fds[0],))

    def busy_ms(self, process: str) -> int | None:
        """Return for how many milliseconds an executor has been busy with one request, 0 if idle.
        Return None if the executor has no readable page."""
        page = self._pages.get(process)
        if page is None or page.owner.role != "executor":
            return None
        if page.reading is not None and time.monotonic() - self._read_at < _JUST_S:
            since = page.reading.busy_ns
        else:
            words = counter_page.read(page.fd, min(page.nbytes, COUNTERS * 8))
            if words is None or len(words) <= BUSY_SINCE:
                return None
            since = words[BUSY_SINCE]
        return max(1, (time.monotonic_ns() - since) // 1_000_000) if since else 0

    def reading(self, process: str) -> CounterReading | None:
        """Return the contents of a page: the identical object as long as nothing changes."""
        page = self._pages.get(process)
        if page is None:
            return None
        just_read = time.monotonic() - self._read_at < _JUST_S
        return page.reading if just_read and page.reading is not None else _read(page)

    def settled(self, now: float) -> bool:
        """Return True if, as far as can be known, all pages have arrived."""
        return now >= self._settle_until

    def uncounted(self) -> dict[str, int]:
        """Return a number for each answer sent but not counted yet, by page. Executors answer
        lanes first, and count a moment later."""
        words = {name: _uncounted(page) for name, page in self._pages.items()}
        return {name: number for name, number in words.items() if number}

    def stored(
        self, supervisor: str, owners: Sequence[wire.PageOwner], fds: Sequence[int], more: bool
    ) -> None:
        """Take in pages of the predecessor, handed back by the supervisor."""
        if not more:
            self._settle_until = 0.0
        done: list[wire.PageOwner] = []
        for owner, fd in zip(owners, fds, strict=False):
            if owner.process in self._totals.added:
                done.append(owner)
            elif owner.process not in self._pages:
                self._pages[owner.process] = _Page(owner, fd, os.fstat(fd).st_size, False)
                continue
            os.close(fd)
        close_all(fds[len(owners) :])
        if done:
            self._send(supervisor, wire.DropPages(tuple(done)))

    def store_all(self, supervisor: str) -> None:
        """Give a new supervisor copies of all pages."""
        for page in self._pages.values():
            self._send(supervisor, wire.StorePages((page.owner,)), (page.fd,))

    def gone(self, process: str) -> None:
        """Note that a process's link has ended. The process may still run."""
        for page in (self._pages.get(process), self._pages.get(process + LANES)):
            if page is not None:
                page.linked = False  # the process may still run

    def tick(self, supervisor: str, served: Served) -> list[CounterReading]:
        """Add the pages of ended processes to the totals. Return their final readings."""
        ended = [p for p in self._pages.values() if not p.linked and _has_ended(p.owner.pid)]
        if not ended:
            if self._file.late:
                self._write()
            return []
        total = _Sum(self._totals.models, self._totals.keys)
        readings = []
        for page in ended:
            last = total.add(page)
            if last is not None:
                total.nothing_in_flight(last)
                readings.append(last)
            role = page.owner.role
            if role != "lane":  # a page of lanes is not a process of its own
                self._totals.ends[role] = self._totals.ends.get(role, 0) + 1
        names = [page.owner.process for page in ended]
        self._totals = replace(
            self._totals,
            models=self._bounded(list(total.models.values()), served),
            keys=self._most_used(total.keys),
            added=[*self._totals.added, *names][-_REMEMBERED:],
        )
        self._write()
        for page in ended:
            del self._pages[page.owner.process]
            os.close(page.fd)
        if supervisor:
            self._send(supervisor, wire.DropPages(tuple(page.owner for page in ended)))
        return readings

    def close(self) -> None:
        for page in self._pages.values():
            os.close(page.fd)
        self._pages.clear()

    # ---------------------------------------------------------------- numbers

    def readings(self) -> list[CounterReading]:
        """Return the current contents of all readable pages."""
        self._read_at = time.monotonic()
        readings = (_read(page) for page in self._pages.values())
        return [reading for reading in readings if reading is not None]

    def oldest_run(self) -> float:
        """Return when the oldest run of an ensemble under way began, in monotonic seconds; inf if
        there is none."""
        began = (page.oldest_run_ns for page in self.readings())
        return min((ns / 1e9 for ns in began if ns), default=inf)

    def custom_metrics(self) -> tuple[list[InstanceMetrics], int]:
        """Return the metrics defined by models whose executors are linked, and the number of
        unreadable pages."""
        told: list[InstanceMetrics] = []
        unreadable = 0
        for page in self._pages.values():
            owner = page.owner
            if owner.role != "executor" or not page.linked:
                continue
            try:
                families = metrics_area.read(page.fd)
            except (OSError, UnreadableMessage):
                unreadable += 1
                continue
            if families:
                told.append(InstanceMetrics(owner.model, owner.version, owner.instance, families))
        return told, unreadable

    def report(self, reconciler: Reconciler, book: RegionBook, gpus: Gpus) -> wire.Report:
        copied = msgspec.msgpack.encode(self._totals.models)
        models_so_far = msgspec.msgpack.decode(copied, type=list[wire.ModelReport])
        total = _Sum(models_so_far, self._totals.keys)
        processes: list[wire.ProcessReport] = []
        starts = dict(self._totals.ends)
        for page in self._pages.values():
            role = page.owner.role
            reading = total.add(page)
            if role == "lane":
                continue
            starts[role] = starts.get(role, 0) + 1
            if reading is not None and page.linked:
                processes.append(reading.report)
        ledger, ends = reconciler.ledger, dict(self._totals.ends)
        pool = (ledger.pool_bytes, ledger.total)
        models = tuple(total.models.values())
        regions = _regions(book)
        return wire.Report(
            models, tuple(processes), starts, ends, *pool, regions, total.unreadable, gpus,
            self._most_used(total.keys),
        )  # fmt: skip

    def _bounded(self, models: list[wire.ModelReport], served: Served) -> list[wire.ModelReport]:
        """Return the models without the oldest unserved models beyond the limit."""
        gone = [m for m in models if not served(m.model, m.version)]
        excess = {id(m) for m in gone[: max(0, len(gone) - self._limit)]}
        return [m for m in models if id(m) not in excess]

    def _most_used(self, keys: Counter[str]) -> dict[str, int]:
        """Return requests by key, within the limit. Counts of the least used keys are merged."""
        if len(keys) <= self._limit:
            return dict(keys)
        most = dict(keys.most_common(self._limit))
        rest = keys.total() - sum(most.values())
        return {**most, OTHER_KEYS: most.get(OTHER_KEYS, 0) + rest}

    def _load(self, epoch: str) -> Totals:
        totals: Totals | None = self._file.read(_decode)
        return totals if totals and totals.epoch == epoch else Totals(epoch)

    def _write(self) -> None:
        self._file.write(msgspec.msgpack.encode(self._totals))


def _read(page: _Page) -> CounterReading | None:
    """Read a page. Return None if its bytes are not as announced."""
    nbytes = page.nbytes
    if page.owner.role == "executor":  # skip sequences behind the counters
        nbytes = min(nbytes, (COUNTERS + executor_counters.NWORDS) * 8)
    words = counter_page.read(page.fd, nbytes)
    if words is None:
        return None
    if page.reading is None or words.obj != page.data:
        page.data, page.reading = words.obj, _parse(page.owner, words)
    return page.reading


def _uncounted(page: _Page) -> int:
    head = {"lane": 0, "executor": COUNTERS}.get(page.owner.role)
    return 0 if head is None else counter_page.read_word(page.fd, head + UNCOUNTED_WORD)


def _parse(owner: wire.PageOwner, words: Words) -> CounterReading | None:
    if owner.role == "executor":
        counters = words[COUNTERS:]
        runs = executor_counters.read(counters)
        if runs is None:
            return None
        gauges = read_gauges(counters)
        busy = words[DEPTH], words[BUSY_SINCE], words[RUNNING], words[VALUES]
        return CounterReading(owner, gauges, {}, runs, *busy, threads=words[THREADS])
    rows = request_counters.read(words)
    if rows is None:
        return None
    keys = request_counters.read_keys(words)
    oldest_run_ns = words[OLDEST_RUN_WORD]
    return CounterReading(owner, read_gauges(words), rows, keys=keys, oldest_run_ns=oldest_run_ns)


def _has_ended(pid: int) -> bool:
    pidfd = pidfd_open(pid)
    if pidfd is None:
        return True
    try:
        return has_ended(pidfd)
    finally:
        os.close(pidfd)


def _regions(book: RegionBook) -> tuple[wire.RegionsReport, ...]:
    by_kind: dict[str, list[int]] = {}
    for region in book.regions.values():
        kind = region.memory.counted_as
        numbers = by_kind.setdefault(kind, [0, 0, 0])
        numbers[0] += 1
        numbers[1] += region.byte_size
        numbers[2] += bool(region.quarantined)
    return tuple(wire.RegionsReport(kind, *numbers) for kind, numbers in sorted(by_kind.items()))
