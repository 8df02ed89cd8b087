"""What the metrics page is told of the service as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.coordinator.stats.incident_detector import IncidentDetector
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.coordinator.stats.process_usage import UsageSample
from shmserve.core.control.records import ProcessRecord
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.protocol.control.history_messages import AskHistory
from shmserve.protocol.control.stats_messages import PageOwner


def test_processor_time_is_that_of_all_processes() -> None:
    sources: Any = SimpleNamespace(
        counters=SimpleNamespace(ends={}),
        book=SimpleNamespace(regions={}),
        reconciler=SimpleNamespace(ledger=SimpleNamespace(total=0)),
    )
    monitoring = Monitoring(sources, lambda *_: None, "e1", 10, False, 0.0)
    roles = ("http", "exporter")
    monitoring._usage._uses = {pid: UsageSample(role, 20.0, 0) for pid, role in enumerate(roles, 1)}
    cpu, of_http, *_ = monitoring._system([])
    assert (cpu, of_http) == (40.0, 20.0)


def test_the_end_of_an_exporter_is_told_once() -> None:
    detector = IncidentDetector({})

    def look(now: float, *exporters: str) -> None:
        records = [ProcessRecord(name, "exporter", 1, 0.0) for name in exporters]
        reconciler: Any = SimpleNamespace(
            processes={record.name: record for record in records},
            instances={},
            failures={},
            models=SimpleNamespace(by_name={}),
        )
        book: Any = SimpleNamespace(regions={})
        detector.look(now, reconciler, book, {})

    look(1.0, "exporter-1-a")
    assert detector.incidents.list() == ()
    look(2.0, "exporter-2-b")
    look(3.0, "exporter-2-b")
    (entry,) = detector.incidents.list()
    assert (entry.what, entry.text, entry.count) == ("exporter", "process ended", 1)


class Service:
    """One executor and one frontend; what their pages say is set, and a second passes."""

    def __init__(self) -> None:
        owner = PageOwner("e", "executor", 1, "m", "1", "m/1/0")
        self.executor = CounterReading(owner, Gauges(), runs=ExecutorCounts())
        self.frontend = CounterReading(PageOwner("h", "http", 2), Gauges())
        counters: Any = SimpleNamespace(ends={}, readings=lambda: [self.executor, self.frontend])
        reconciler: Any = SimpleNamespace(
            processes={},
            instances={},
            failures={},
            models=SimpleNamespace(by_name={}),
            ledger=SimpleNamespace(total=0),
        )
        sources: Any = SimpleNamespace(
            counters=counters,
            book=SimpleNamespace(regions={}),
            reconciler=reconciler,
            gpus=SimpleNamespace(latest=lambda: ()),
            report=lambda: None,
        )
        self.monitoring = Monitoring(sources, lambda *_: None, "e1", 10, False, 0.5)
        usage = self.monitoring._usage
        usage.look = lambda *_: False  # type: ignore[method-assign]
        usage._uses = {1: UsageSample("executor", 0.0, 7, True)}
        self.now = 0.5

    def second(self, answered: int, depth: int) -> None:
        """So many requests have been answered so far, and so many are with the executor."""
        rows = {("m", "1"): RequestCounts(succeeded=answered, in_flight=depth)}
        if self.frontend.rows != rows:
            self.frontend = CounterReading(self.frontend.owner, Gauges(), rows)
        self.now += 1.0
        self.monitoring.tick(self.now)

    def column(self, name: str) -> list[float | None]:
        report = self.monitoring.report(AskHistory(1, 0), self.now)
        assert report is not None
        (model,) = report.models
        return list(model.columns[name])


def test_seconds_in_which_nothing_changes_are_as_the_last_one_but_for_what_was_counted() -> None:
    service = Service()
    for answered, depth in ((0, 0), (5, 2), (5, 2), (5, 2), (6, 0), (6, 0)):
        service.second(answered, depth)
    assert service.column("requests") == [0, 5, 0, 0, 1, 0]
    assert service.column("depth") == [0, 2, 2, 2, 0, 0]
    assert service.column("memory") == [7] * 6


def test_an_executor_rests_that_sleeps_unless_somebody_waits_for_it() -> None:
    service = Service()
    found = []
    for depth in (0, 1, 1, 0):
        service.second(0, depth)
        found.append(set(service.monitoring.resting))
    assert found == [{"e"}, set(), set(), {"e"}]
