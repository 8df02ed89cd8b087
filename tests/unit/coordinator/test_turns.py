"""Turns of the coordinator: actions, and times."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.coordinator import coordinator_loop
from shmserve.coordinator.coordinator_loop import CoordinatorLoop
from shmserve.coordinator.message_router import MessageRouter
from shmserve.core.control.watchdog import Watchdog
from shmserve.protocol.control.link_messages import AskStats


class Router:
    """Router of a single executor, which never answers; `busy_ms`: value on the executor's page."""

    def __init__(self, limit_s: float) -> None:
        self.busy_ms = 0
        self.asked = 0
        self.parts: Any = MagicMock()
        self.parts.watchdog = Watchdog(limit_s)
        self.parts.reconciler.processes = {"e": SimpleNamespace(name="e", role="executor")}
        self.parts.introspection.counters.busy_ms = lambda process: self.busy_ms
        self.parts.introspection.rests = lambda process: False
        self._router = MessageRouter(self.parts, self._send)
        self._now = 1000.0

    def _send(self, process: str, message: object) -> None:
        self.asked += isinstance(message, AskStats)

    def turns(self, seconds: float) -> None:
        """Run a turn each second, and further turns in between."""
        end = self._now + seconds
        while self._now < end:
            self._router.tick(self._now)
            self._now += 0.25

    @property
    def silent(self) -> bool:
        return bool(self.parts.reconciler.silent.called)


@pytest.mark.parametrize(("limit_s", "patience_s", "questions"), [(1, 2, 2), (20, 20, 3)])
def test_silence_is_noticed_after_the_patience(limit_s, patience_s, questions) -> None:
    router = Router(limit_s)
    router.turns(patience_s)
    assert router.asked == questions
    assert not router.silent
    router.turns(1)
    assert router.silent


def test_what_runs_is_looked_at_each_second_and_not_asked() -> None:
    router = Router(20)
    router.busy_ms = 5
    router.turns(10)
    assert router.parts.reconciler.busy.call_count == 10
    assert router.asked == 0


def test_turns_come_as_often_as_signs_of_life_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(coordinator_loop, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    beats = iter([True, True, False])
    loop: Any = MagicMock()
    loop._beat_s, loop._beat_at, loop._stop_at = 0.25, 0.0, math.inf
    loop._wake.stopping = False
    loop._router.urgent = False
    loop._introspection.due = loop._control.due = math.inf
    loop._selector.select = lambda wait_s: waits.append(wait_s) or ()
    loop._turn = lambda: CoordinatorLoop._turn(loop)
    CoordinatorLoop.run(loop, beats.__next__)
    assert waits == [0.25, 0.25]
