"""Service-wide data of the metrics page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.admin_tables import OwnProcess
from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.coordinator.stats.introspection import Introspection
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.coordinator.stats.process_usage import UsageSample
from shmserve.core.control.lifecycle import State
from shmserve.core.control.records import InstanceRecord, ProcessRecord
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import Reason, RequestCounts
from shmserve.protocol.control.history_messages import AskHistory
from shmserve.protocol.control.link_messages import Show
from shmserve.protocol.control.stats_messages import AskReport, PageOwner, Report, RequestFailed


def test_processor_time_is_that_of_all_processes() -> None:
    sources: Any = SimpleNamespace(
        counters=SimpleNamespace(ends={}),
        book=SimpleNamespace(regions={}),
        reconciler=SimpleNamespace(ledger=SimpleNamespace(total=0)),
    )
    monitoring = Monitoring(sources, lambda *_: None, "e1", 10, False, 0.0)
    roles = ("http", "exporter")
    monitoring.usage._uses = {pid: UsageSample(role, 20.0, 0) for pid, role in enumerate(roles, 1)}
    cpu, of_http, *_ = monitoring._system([])
    assert (cpu, of_http) == (40.0, 20.0)


def test_the_end_of_an_exporter_is_told_once() -> None:
    service = Service()
    sources = service.monitoring._sources
    sources.counters.gone = lambda process: None  # type: ignore[method-assign]
    introspection = Introspection(
        sources, service.monitoring, lambda *_: None, OwnProcess("c", 3, 0.0)
    )
    for name, role in (("exporter-1-a", "exporter"), ("exporter-2-b", "exporter"), ("x", "cli")):
        sources.reconciler.processes[name] = ProcessRecord(name, role, 1, 0.0)
    introspection.gone("exporter-1-a", 1.0)
    introspection.gone("x", 1.0)
    (entry,) = service.monitoring.incidents.list()
    assert (entry.what, entry.text, entry.count) == ("exporter", "process ended", 1)


def test_a_report_waits_a_moment_for_what_executors_are_about_to_count() -> None:
    service, sent = Service(), []
    sources = service.monitoring._sources
    words: dict[str, int] = {}
    sources.counters.settled = lambda now: True  # type: ignore[method-assign]
    sources.counters.uncounted = lambda: {k: v for k, v in words.items() if v}  # type: ignore[method-assign]
    sources.counters.tick = lambda *_: []  # type: ignore[method-assign]
    sources.reconciler.models.has = lambda *_: True  # type: ignore[method-assign]
    sources.report = lambda: Report((), (), {}, {}, 0, 0, (), 0)  # type: ignore[method-assign]
    introspection = Introspection(
        sources, None, lambda asker, message, *_: sent.append(asker), OwnProcess("c", 3, 0.0)
    )

    def ask(asker: str, now: float) -> None:
        message, role = (Show(1, "stats"), "cli") if asker == "cli" else (AskReport(1), "http")
        introspection.handle(asker, role, message, [], "", now)

    def sent_at(now: float) -> list[str]:
        introspection.tick("", now)
        told = sent[:]
        sent.clear()
        return told

    ask("h", 1.0)
    assert sent_at(1.0) == ["h"], "every answer is counted"
    words |= {"a": 7, "b": 3}
    ask("h", 2.0)
    ask("cli", 2.0)
    assert sent_at(2.0) == []
    assert introspection.urgent
    assert introspection.due == 2.001
    words["a"] = 8
    assert sent_at(2.001) == [], "the answer of b may be the asker's"
    words["b"] = 0
    assert sorted(sent_at(2.002)) == ["cli", "h"]
    assert not introspection.urgent
    ask("h", 3.0)
    assert sent_at(3.4) == []
    assert sent_at(3.6) == ["h"], "it was killed, or stopped"


def test_failed_requests_and_ended_frontends_are_incidents() -> None:
    service = Service()
    service.monitoring.told(RequestFailed("m", "1", int(Reason.MODEL), "why"))
    service.monitoring.told(RequestFailed("m", "1", len(Reason), "no reason of ours"))
    failures = [0] * len(Reason)
    failures[Reason.MODEL] = 3
    service.counts({("m", "1"): RequestCounts(failures=failures)})
    service.monitoring.ended(service.frontend)
    service.monitoring.ended(service.executor)
    assert [(e.what, e.count, e.said) for e in service.monitoring.incidents.list()] == [
        ("m/1", 3, "why"),
        ("HTTP worker", 1, ""),
    ]


def test_what_failed_before_a_restart_is_told_again() -> None:
    service = Service()
    reconciler = service.monitoring._sources.reconciler
    reconciler.failures["broken"] = "no configuration"
    for name, left in (("m/1/0", False), ("m/1/1", True)):
        record = InstanceRecord(name, since=0.0, deadline=0.0)
        record.state, record.reason, record.left = State.FAILED, "too large", left
        reconciler.instances[name] = record
    service.monitoring.take_over()
    assert [(e.what, e.text) for e in service.monitoring.incidents.list()] == [
        ("broken", "not served: no configuration"),
        ("m/1/0", "too large"),
    ]


class Service:
    """An executor and a frontend with counter pages set by the test, and a clock that moves by
    seconds."""

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
        usage = self.monitoring.usage
        usage.look = lambda *_: False  # type: ignore[method-assign]
        usage._uses = {1: UsageSample("executor", 0.0, 7, True)}
        self.now = 0.5

    def second(self, answered: int, depth: int) -> None:
        """So many requests have been answered so far, and so many are with the executor."""
        self.counts({("m", "1"): RequestCounts(succeeded=answered, in_flight=depth)})

    def counts(self, rows: dict[tuple[str, str], RequestCounts]) -> None:
        """Let a second pass, at whose end the frontend has counted `rows`."""
        if self.frontend.rows != rows:
            self.frontend = CounterReading(self.frontend.owner, Gauges(), rows)
        self.now += 1.0
        self.monitoring.tick(self.now)

    def column(self, name: str) -> list[float | None]:
        report = self.monitoring.report(AskHistory(1, 0), self.now)
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
