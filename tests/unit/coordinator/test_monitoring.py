"""What the metrics page is told of the service as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.incident_detector import IncidentDetector
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.coordinator.stats.process_usage import UsageSample
from shmserve.core.control.records import ProcessRecord


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
