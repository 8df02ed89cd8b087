"""Process usage: processor time and memory of the service's processes, read once a second, or
seldom while idle."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import ProcessRecord
from shmserve.observe import usage
from shmserve.observe.usage import Usage
from shmserve.protocol.control.history_messages import ProcessUse
from shmserve.protocol.control.stats_messages import UsageReport


class UsageSample(NamedTuple):
    """Usage of one process. `cpu_percent`: since the last look, 100 is one core. `private`: bytes.
    `rests`: true if the process sleeps and used no processor time. `resident`: bytes, shared memory
    included."""

    role: str
    cpu_percent: float
    private: int
    rests: bool = False
    resident: int = 0


class Owner(NamedTuple):
    """Owner of processor time. `model`, `version`: of executors."""

    role: str
    model: str = ""
    version: str = ""


_UNSERVED = Owner("executor")  # all models that are not served any more
_NONE = UsageSample("", 0.0, 0)
_IDLE_S = 5.0  # between two looks at idle processes

_OTHERS = ("cli", "model")  # visitors, and processes counted with their executor


class ProcessUsage:
    """Usage of all linked processes, and of the coordinator. `looked_at`: time of the last look."""

    def __init__(self, now: float) -> None:
        self.machine = usage.machine_memory()
        own = usage.of_process(os.getpid())
        self._own_start = own.started if own is not None else 0
        self._since = self.looked_at = now
        self._last: dict[int, Usage] = {}
        self._uses: dict[int, UsageSample] = {}
        self._processes: list[str] = []  # linked at the last look
        self._owners: dict[int, Owner] = {}
        # processor time by owner, in seconds, and the part of each process that is in it
        self._spent: defaultdict[Owner, float] = defaultdict(float)
        self._counted: dict[int, Usage] = {}

    def look(self, reconciler: Reconciler, now: float, idle: bool = False) -> bool:
        """Read the usage of all processes. `idle`: true if no counter has changed since the last
        look. Return False without reading if the processes are idle and were read lately."""
        processes = list(reconciler.processes)
        if idle and now - self.looked_at < _IDLE_S and processes == self._processes:
            return False
        self._processes = processes
        records = reconciler.processes.values()
        owners = {record.pid: _owner(record) for record in records if record.role not in _OTHERS}
        owners[os.getpid()] = Owner("coordinator")
        self._owners = owners
        read = {pid: usage.of_process(pid) for pid in owners}
        used_by_pid = {pid: used for pid, used in read.items() if used is not None}
        seconds, self.looked_at = max(now - self.looked_at, 1e-3), now
        self._uses = {}
        for pid, used in used_by_pid.items():
            last = self._last.get(pid)
            same = last is not None and last.started == used.started
            spent = used.cpu_s - last.cpu_s if last is not None and same else 0.0
            rests = same and used.sleeps and not spent
            role, percent = owners[pid].role, 100 * spent / seconds
            self._uses[pid] = UsageSample(role, percent, used.private, rests, used.resident)
            self._count(pid, used)
        self._last = used_by_pid
        self._forget(reconciler)
        return True

    def _count(self, pid: int, used: Usage) -> None:
        """Add the processor time that a process has used since its last count. A process that is
        older than the coordinator counts from the first look: after a restart of the coordinator,
        Prometheus would take all of the process's time as new."""
        before = self._counted.get(pid)
        grown = 0.0
        if before is not None and before.started == used.started:
            grown = used.cpu_s - before.cpu_s
        elif used.started >= self._own_start:
            grown = used.cpu_s
        self._spent[self._owners[pid]] += grown
        self._counted[pid] = used

    def _forget(self, reconciler: Reconciler) -> None:
        """Forget ended processes (a living process may link again), and join unserved models."""
        for pid in self._counted.keys() - self._owners.keys():
            used = usage.of_process(pid)
            if used is None or used.started != self._counted[pid].started:
                del self._counted[pid]
        for owner in self._spent.keys() - set(self._owners.values()):
            if owner.model and not reconciler.models.has(owner.model, owner.version):
                self._spent[_UNSERVED] += self._spent.pop(owner)

    def report(self) -> Iterator[UsageReport]:
        """Yield processor time and memory by owner, for `/metrics`."""
        private: Counter[Owner] = Counter()
        resident: Counter[Owner] = Counter()
        for pid, use in self._uses.items():
            private[self._owners[pid]] += use.private
            resident[self._owners[pid]] += use.resident
        for owner, cpu_s in sorted(self._spent.items()):
            yield UsageReport(*owner, cpu_s, private[owner], resident[owner])

    def of(self, pid: int) -> UsageSample:
        """Return the usage of a process, zeros for an unknown process."""
        return self._uses.get(pid, _NONE)

    def is_new(self, pid: int) -> bool:
        """Return True if the process certainly started after the coordinator."""
        last = self._last.get(pid)
        return last is not None and last.started >= self._own_start > 0

    def cpu_of(self, role: str) -> float:
        return sum(use.cpu_percent for use in self._uses.values() if use.role == role)

    @property
    def cpu(self) -> float:
        """Processor use of all processes; 100 is one core."""
        return sum(use.cpu_percent for use in self._uses.values())

    @property
    def memory(self) -> int:
        """Private memory of all processes, in bytes."""
        return sum(use.private for use in self._uses.values())

    @property
    def count(self) -> int:
        return len(self._uses)

    def list(self, reconciler: Reconciler, now: float) -> tuple[ProcessUse, ...]:
        """Return one row for each process, for display."""
        rows = [
            (record.role, record.instance, now - record.since, record.pid)
            for record in reconciler.processes.values()
            if record.role not in _OTHERS
        ]
        rows.append(("coordinator", "", now - self._since, os.getpid()))
        return tuple(
            ProcessUse(role, instance, round(up_s, 1), *self._shown(pid))
            for role, instance, up_s, pid in sorted(rows, key=lambda row: row[:2])
        )

    def _shown(self, pid: int) -> tuple[float | None, int | None]:
        use = self._uses.get(pid)
        return (None, None) if use is None else (round(use.cpu_percent, 1), use.private)


def _owner(record: ProcessRecord) -> Owner:
    model, _, rest = record.instance.rpartition("/")[0].rpartition("/")
    return Owner(record.role, model, rest) if model else Owner(record.role)
