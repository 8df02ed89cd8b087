"""Introspection: answers questions about numbers, tables and history."""

from __future__ import annotations

import os
from math import inf

import msgspec
from msgspec.structs import replace

from shmserve.coordinator.models.supervisor_sync import Send
from shmserve.coordinator.stats import admin_tables, host_capacity
from shmserve.coordinator.stats.admin_tables import OwnProcess
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.coordinator.stats.process_usage import ProcessUsage
from shmserve.coordinator.stats.stats_sources import StatsSources
from shmserve.core.registry import Snapshot
from shmserve.protocol.control import stats_messages as wire
from shmserve.protocol.control.history_messages import AskHistory, HistoryGiven
from shmserve.protocol.control.link_messages import Show, Shown, Stats
from shmserve.protocol.control.messages import ToCoordinator
from shmserve.transport.channel import close_all

# Longest wait of a report for executors to count sent answers, and the time between two looks, in
# seconds. Counting takes some microseconds; an executor may have been killed
# or stopped meanwhile.
_COUNTING_S, _LOOK_S = 0.5, 0.001
_USAGE_S = 1.0  # least time between two looks at all processes, without a history


class Introspection:
    """Questions about the service. `monitoring`: None without a history."""

    def __init__(
        self, sources: StatsSources, monitoring: Monitoring | None, send: Send, own: OwnProcess
    ) -> None:
        self._sources = sources
        self._reconciler = sources.reconciler
        self.counters = sources.counters
        self.monitoring = monitoring
        self._send = send
        self._own = own
        self._questions = admin_tables.TableQueries(send)
        self._usage = monitoring.usage if monitoring is not None else ProcessUsage(-inf)
        self._reports: list[tuple[str, int]] = []  # open requests for a report: (process, ticket)
        self._tables: list[tuple[str, int]] = []  # open requests for the table `stats`
        self._uncounted: dict[str, int] = {}  # answers that open requests wait for
        self._count_until = 0.0
        self._look_at = inf

    @property
    def urgent(self) -> bool:
        """True if a question waits for answers of other processes."""
        return bool(len(self._questions) or self._reports or self._tables)

    @property
    def due(self) -> float:
        """Monotonic time, in seconds, of the next sample for the history, or look at uncounted
        answers."""
        return min(self._look_at, self.monitoring.due if self.monitoring is not None else inf)

    def free_percent(self, snapshot: Snapshot | None) -> int:
        """Return the host's weight for a load balancer, in percent. `snapshot`: the published
        snapshot."""
        return host_capacity.free_percent(self._sources, snapshot)

    def gone(self, process: str, now: float) -> None:
        """Note the end of a link. The reconciler must still know the process."""
        known = self._reconciler.processes.get(process)
        if self.monitoring is not None and known is not None and known.role == "exporter":
            # the exporter has no counter page
            self.monitoring.happened("process ended", "exporter")
        self._questions.gone(process, now)
        self.counters.gone(process)

    def tick(self, supervisor: str, now: float) -> None:
        self._questions.tick(now)
        self._report(now)
        ended = self.counters.tick(supervisor, self._reconciler.models.has)
        if self.monitoring is not None:
            for reading in ended:
                self.monitoring.ended(reading)
            self.monitoring.tick(now)

    def rests(self, process: str) -> bool:
        """Return True if an executor is idle and no request waits, as far as visible from
        outside."""
        return self.monitoring is not None and process in self.monitoring.resting

    def exited(self, instance: str, reason: str) -> None:
        if self.monitoring is not None:
            self.monitoring.happened("instance failed", instance, reason)

    def answered(self, process: str, message: Stats, now: float) -> bool:
        """Take in a process's numbers. Return True if the message answered a question."""
        if message.ticket:
            self._questions.answered(process, message.ticket, message.stats, now)
            return True
        if self.monitoring is not None:
            self.monitoring.answered(process, message.stats)
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
        """Handle a question or answer about numbers, and close its descriptors. Return False for
        any other message."""
        match message, role:
            case wire.StoredPages(), "supervisor":
                self.counters.stored(process, message.owners, fds, message.more)
                self._report(now)
                return True
            case wire.CounterPage(), ("http" | "grpc" | "model" | "executor"):
                instance = (message.model, message.version, message.instance)
                owner = wire.PageOwner(
                    process, role, self._reconciler.processes[process].pid, *instance
                )
                self.counters.arrived(owner, message, fds, supervisor)
                return True
            case wire.AskReport(), ("http" | "grpc" | "exporter"):
                self._await_counts(self._reports, process, message.ticket, now)
            case wire.RequestFailed(), ("http" | "grpc" | "model"):
                if self.monitoring is not None:
                    self.monitoring.told(message)
            case AskHistory(), ("http" | "grpc"):
                self._history(process, message, now)
            case Show(), "cli":
                self._show(process, message, now)
            case _:
                return False
        close_all(fds)
        return True

    def _show(self, asker: str, message: Show, now: float) -> None:
        if message.what in admin_tables.ASKED:
            names = [p.name for p in self._reconciler.processes.values() if p.role != "cli"]
            self._questions.ask(asker, message.ticket, message.what, names, now)
            return
        if message.what == "stats":
            self._await_counts(self._tables, asker, message.ticket, now)
            return
        rates = self.monitoring.rates if self.monitoring is not None else dict
        tables = {
            "processes": lambda: admin_tables.process_rows(self._reconciler, now, self._own),
            "models": lambda: admin_tables.model_rows(
                self._reconciler,
                rates(),
                {page.owner.process: page.threads for page in self.counters.readings()},
            ),
            "regions": lambda: admin_tables.region_rows(self._sources.book),
            "resources": lambda: admin_tables.resource_rows(self._sources.resources()),
            "gpus": lambda: admin_tables.gpu_rows(self._sources.gpus.latest()),
        }
        if message.what not in tables:
            self._send(asker, Shown(message.ticket, (), f"nothing is called {message.what!r}"))
            return
        for part in admin_tables.parts(message.ticket, tables[message.what]()):
            self._send(asker, part)

    def _await_counts(
        self, questions: list[tuple[str, int]], asker: str, ticket: int, now: float
    ) -> None:
        """Answer a question once all answers sent by now are counted: the asker may have received
        such an answer."""
        if not (self._reports or self._tables):
            self._count_until = now + _COUNTING_S
        questions.append((asker, ticket))
        self._uncounted |= self.counters.uncounted()
        self._report(now)

    def _report(self, now: float) -> None:
        """Send the report to all waiting processes, once the counters have settled."""
        if not (self._reports or self._tables):
            return
        latest = self.counters.uncounted() if self._uncounted else {}
        self._uncounted = {k: v for k, v in self._uncounted.items() if latest.get(k) == v}
        self._look_at = now + _LOOK_S if self._uncounted and now < self._count_until else inf
        if self._look_at < inf:
            return
        self._uncounted = {}
        for asker, ticket in self._tables:
            for part in admin_tables.parts(ticket, admin_tables.stats_rows(self._sources.report())):
                self._send(asker, part)
        self._tables.clear()
        if not self._reports or not self.counters.settled(now):
            return
        if self.monitoring is None and now - self._usage.looked_at >= _USAGE_S:
            self._usage.look(self._reconciler, now)
        report = replace(self._sources.report(), usage=tuple(self._usage.report()))
        data = msgspec.msgpack.encode(report)
        for asker, ticket in self._reports:
            self._send_file(asker, wire.ReportGiven(ticket, len(data)), data)
        self._reports.clear()

    def _history(self, asker: str, message: AskHistory, now: float) -> None:
        report = self.monitoring.report(message, now) if self.monitoring is not None else None
        if report is None:
            self._send(asker, HistoryGiven(message.ticket, 0))
            return
        data = msgspec.msgpack.encode(report)
        self._send_file(asker, HistoryGiven(message.ticket, len(data)), data)

    def _send_file(
        self, process: str, message: wire.ReportGiven | HistoryGiven, data: bytes
    ) -> None:
        """Send a message with data in a memfd, because the data may not fit a packet."""
        fd = os.memfd_create("shmserve report", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            self._send(process, message, (fd,))
        finally:
            os.close(fd)
