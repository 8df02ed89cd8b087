"""The information desk: who asks for numbers, tables or history gets them here."""

from __future__ import annotations

import os
from math import inf

import msgspec

from shmserve.coordinator.models.supervisor_sync import Send
from shmserve.coordinator.regions.registrations import Regions
from shmserve.coordinator.stats import admin_tables as shows
from shmserve.coordinator.stats.counter_totals import Counters
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.core.control.reconciler import Fleet
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol.control.history_messages import AskHistory, HistoryGiven
from shmserve.protocol.control.link_messages import Show, Shown, Stats
from shmserve.protocol.control.stats_messages import (
    AskReport,
    CounterPage,
    PageOwner,
    Report,
    ReportGiven,
    StoredPages,
)
from shmserve.protocol.messages import ToCoordinator
from shmserve.transport.questions import close_all


class Information:
    """See the module. `gpus`: reads them; `own`: the coordinator's process id, pid and start."""

    def __init__(
        self,
        fleet: Fleet,
        regions: Regions,
        counters: Counters,
        gpus: GpuUse,
        send: Send,
        own: tuple[str, int, float],
    ) -> None:
        self.counters = counters
        self.monitoring: Monitoring | None = None
        self._fleet = fleet
        self._regions = regions
        self._gpus = gpus
        self._send = send
        self._own = own
        self._questions = shows.Questions(send)
        self._reports: list[tuple[str, int]] = []  # asked for: (process, ticket)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for others to answer."""
        return bool(len(self._questions) or self._reports)

    @property
    def due(self) -> float:
        """When the next sample for the history is to be taken."""
        return self.monitoring.due if self.monitoring is not None else inf

    def gone(self, process: str, now: float) -> None:
        self._questions.gone(process, now)
        self.counters.gone(process)

    def tick(self, supervisor: str, now: float) -> None:
        self._questions.tick(now)
        self._report(now)
        self.counters.tick(supervisor, self._fleet.models.has)
        if self.monitoring is not None:
            self.monitoring.tick(now)

    def exited(self, instance: str, why: str) -> None:
        """An executor has ended that should have gone on."""
        if self.monitoring is not None:
            self.monitoring.exited(instance, why)

    def told(self, process: str, message: Stats, now: float) -> bool:
        """What a process told of itself; whether it was the answer to a question."""
        if message.ticket:
            self._questions.answered(process, message.ticket, message.stats, now)
            return True
        if self.monitoring is not None:
            self.monitoring.told(process, message.stats)
        return False

    def handle(
        self,
        process: str,
        role: str,
        message: ToCoordinator,
        fds: list[int],
        supervisor: str,
        now: float,
    ) -> bool:
        """Whether it was a message for this desk; then its fds are taken care of."""
        match message, role:
            case StoredPages(), "supervisor":
                self.counters.stored(process, message.owners, fds, message.more)
                self._report(now)
                return True
            case CounterPage(), ("http" | "grpc" | "executor"):
                pid = self._fleet.processes[process].pid
                of = (message.model, message.version, message.instance)
                self.counters.arrived(PageOwner(process, role, pid, *of), message, fds, supervisor)
                return True
            case AskReport(), ("http" | "grpc"):
                self._reports.append((process, message.ticket))
                self._report(now)
            case AskHistory(), ("http" | "grpc"):
                self._history(process, message, now)
            case Show(), "cli":
                self._show(process, message, now)
            case _:
                return False
        close_all(fds)
        return True

    def _show(self, asker: str, message: Show, now: float) -> None:
        if message.what in shows.ASKED:
            of = [p.name for p in self._fleet.processes.values() if p.role != "cli"]
            self._questions.ask(asker, message.ticket, message.what, of, now)
            return
        if message.what == "processes":
            rows = shows.process_rows(self._fleet, now, self._own)
        elif message.what == "models":
            rows = shows.model_rows(self._fleet)
        elif message.what == "regions":
            rows = shows.region_rows(self._regions.book)
        elif message.what == "stats":
            rows = shows.stats_rows(self._numbers())
        elif message.what == "gpus":
            rows = shows.gpu_rows(self._gpus.latest())
        else:
            self._send(asker, Shown(message.ticket, (), f"nothing is called {message.what!r}"))
            return
        for part in shows.parts(message.ticket, rows):
            self._send(asker, part)

    def _numbers(self) -> Report:
        return self.counters.report(self._fleet, self._regions.book, self._gpus.latest())

    def _report(self, now: float) -> None:
        """All numbers to all who asked."""
        if not self._reports or not self.counters.settled(now):
            return
        data = msgspec.msgpack.encode(self._numbers())
        for asker, ticket in self._reports:
            self._send_file(asker, ReportGiven(ticket, len(data)), data)
        self._reports.clear()

    def _history(self, asker: str, message: AskHistory, now: float) -> None:
        """What happened lately."""
        report = self.monitoring.report(message, now) if self.monitoring is not None else None
        if report is None:
            self._send(asker, HistoryGiven(message.ticket, 0))
            return
        data = msgspec.msgpack.encode(report)
        self._send_file(asker, HistoryGiven(message.ticket, len(data)), data)

    def _send_file(self, process: str, message: ReportGiven | HistoryGiven, data: bytes) -> None:
        """A message and its data in a file of their own, because they may outgrow a packet."""
        fd = os.memfd_create("shmserve report", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            self._send(process, message, (fd,))
        finally:
            os.close(fd)
