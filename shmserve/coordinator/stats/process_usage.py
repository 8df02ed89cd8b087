"""Processor and memory that the service's processes use: looked at once a second, or seldom where
nothing happens."""

from __future__ import annotations

import os
from typing import NamedTuple

from shmserve.core.control.reconciler import Reconciler
from shmserve.observe import usage
from shmserve.observe.usage import Usage
from shmserve.protocol.control.history_messages import ProcessUse


class UsageSample(NamedTuple):
    """`cpu_percent`: since the last look, 100 is one core. `rests`: none, and it sleeps."""

    role: str
    cpu_percent: float
    private: int
    rests: bool = False


_NONE = UsageSample("", 0.0, 0)
_IDLE_S = 5.0  # between two looks at processes that have nothing to do

_OTHERS = ("cli", "model")  # that only look in, and that are a part of an executor


class ProcessUsage:
    """All processes with a link, and the coordinator itself."""

    def __init__(self, now: float) -> None:
        self.machine = usage.machine_memory()
        own = usage.of_process(os.getpid())
        self._own_start = own.started if own is not None else 0
        self._since = self._looked_at = now
        self._last: dict[int, Usage] = {}
        self._uses: dict[int, UsageSample] = {}
        self._processes: list[str] = []  # at the last look

    def look(self, reconciler: Reconciler, now: float, idle: bool = False) -> bool:
        """Read them. `idle`: there was nothing to do since the last look, which may stay true;
        False: so it was taken to do."""
        processes = list(reconciler.processes)
        if idle and now - self._looked_at < _IDLE_S and processes == self._processes:
            return False
        self._processes = processes
        records = reconciler.processes.values()
        roles = {record.pid: record.role for record in records if record.role not in _OTHERS}
        roles[os.getpid()] = "coordinator"
        read = {pid: usage.of_process(pid) for pid in roles}
        used_by_pid = {pid: used for pid, used in read.items() if used is not None}
        seconds, self._looked_at = max(now - self._looked_at, 1e-3), now
        self._uses = {}
        for pid, used in used_by_pid.items():
            last = self._last.get(pid)
            same = last is not None and last.started == used.started
            spent = used.cpu_s - last.cpu_s if last is not None and same else 0.0
            rests = same and used.sleeps and not spent
            self._uses[pid] = UsageSample(roles[pid], 100 * spent / seconds, used.private, rests)
        self._last = used_by_pid
        return True

    def of(self, pid: int) -> UsageSample:
        """Of one process; zeros if it is not known."""
        return self._uses.get(pid, _NONE)

    def is_new(self, pid: int) -> bool:
        """Whether it is certain that this process has started after this one."""
        known = self._last.get(pid)
        return known is not None and known.started >= self._own_start > 0

    def cpu_of(self, role: str) -> float:
        return sum(use.cpu_percent for use in self._uses.values() if use.role == role)

    @property
    def cpu(self) -> float:
        """Of all processes, whatever their role."""
        return sum(use.cpu_percent for use in self._uses.values())

    @property
    def memory(self) -> int:
        """Bytes that processes have for themselves."""
        return sum(use.private for use in self._uses.values())

    @property
    def count(self) -> int:
        return len(self._uses)

    def list(self, reconciler: Reconciler, now: float) -> tuple[ProcessUse, ...]:
        """For people: one row a process."""
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
