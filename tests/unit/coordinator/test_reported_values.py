"""Executors are asked for their models' reported values only while new values are possible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.protocol.control.link_messages import AskStats


def test_only_a_model_that_reports_is_asked_and_no_second_of_it_is_missed() -> None:
    asked: list[str] = []

    def send(process: str, message: Any, fds: tuple[int, ...] = ()) -> None:
        assert message == AskStats(0, "values")
        asked.append(process)

    sources: Any = SimpleNamespace(counters=SimpleNamespace(ends={}))
    monitoring = Monitoring(sources, send, "e1", 10, False, 0.0)

    def second(number: int, values: int, told: int) -> int:
        """Return the number of questions after the model has reported `values`, `told` of them
        lately."""
        asked.clear()
        owners = {"reports": values, "never": 0}
        readings: list[Any] = [
            SimpleNamespace(runs=True, owner=SimpleNamespace(process=name), values=count)
            for name, count in owners.items()
        ]
        monitoring._ask(readings, number)
        for process in asked:
            monitoring.answered(process, {"values": {"n": ("inc", told, float(told))}})
        assert "never" not in asked
        return len(asked)

    assert second(1, 0, 0) == 0
    assert second(2, 5, 0) == 1, "its second is not over"
    assert second(3, 5, 5) == 1
    assert second(4, 5, 0) == 1, "it had some"
    assert [second(number, 5, 0) for number in (5, 6, 7)] == [0, 0, 0]
    assert monitoring._metrics["reports"]["n"].value == 0.0, "still known, with nothing"
    assert second(8, 6, 1) == 1
