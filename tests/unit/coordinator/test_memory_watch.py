"""Executors with `max_memory`, as seen by the coordinator."""

import os
from typing import Any

import msgspec
import pytest

from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.coordinator.stats.memory_watch import MemoryWatch
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, Revision, VersionRecord
from shmserve.core.memory.budget import Ledger
from shmserve.core.stats.counter_pages import Gauges
from shmserve.observe import usage
from shmserve.protocol.control.stats_messages import PageOwner
from shmserve.tensor.spec import ModelSpec

PROCESS, INSTANCE = "executor-1-aa", "m/1/0"


class World:
    """This process as an executor. `used`: bytes that it seems to use."""

    def __init__(self, bound: str | None) -> None:
        parameters = {} if bound is None else {"max_memory": bound}
        self.spec = ModelSpec("m", "1", "", "python", 0, (), (), parameters=parameters)
        self.reconciler = Reconciler(Ledger(1000, 100), 10.0, 10.0)
        revision = Revision(1, [VersionRecord(self.spec, [InstanceRecord(INSTANCE)])])
        self.reconciler.models.load("m", revision, 0.0)
        self.reconciler.started(INSTANCE, os.getpid(), 0.0)
        self.reconciler.hello(PROCESS, "executor", os.getpid(), 0, INSTANCE, 0.0)
        self.reading = CounterReading(PageOwner(PROCESS, "executor", os.getpid()), Gauges())
        self.watch = MemoryWatch(self.reconciler, lambda process: self.reading)

    def loaded(self) -> None:
        self.reconciler.loaded(PROCESS, self.spec, "s.sock", 0.0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measured processes; each uses 96 MiB."""
    pids: list[int] = []

    def measure(pid: int) -> int:
        pids.append(pid)
        return 96 << 20

    monkeypatch.setattr(usage, "anonymous_memory", measure)
    monkeypatch.setattr(usage, "proportional_memory", measure)
    return pids


def test_the_reason_has_the_bound_and_the_use(looks: list[int]) -> None:
    world = World("64 MiB")
    reason = "the model used more than its max_memory of 64 MiB: 96 MiB"
    assert world.watch.looked(PROCESS) == reason, "while it loads"
    assert world.watch.looked(PROCESS, loaded=True) == reason
    world.loaded()
    assert world.watch.looked(PROCESS) == reason
    world.reconciler.outgrown(PROCESS, reason, 1.0)
    assert world.watch.looked(PROCESS) == "", "it ends already"


def test_without_a_bound_nothing_is_measured(looks: list[int]) -> None:
    world = World(None)
    assert world.watch.looked(PROCESS, loaded=True) == ""
    assert looks == []


def test_a_bound_that_cannot_be_held_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage, "anonymous_memory", lambda pid: None)
    monkeypatch.setattr(usage, "proportional_memory", lambda pid: None)
    world = World("64 MiB")
    with monkeypatch.context() as patch:
        patch.setattr(usage, "of_process", lambda pid: None)
        assert world.watch.looked(PROCESS) == ""
    assert not caplog.records, "the process has ended"
    assert [world.watch.looked(PROCESS) for _ in range(3)] == [""] * 3
    (record,) = caplog.records
    assert record.message.startswith("max_memory cannot be held: the system does not tell")


def test_an_executor_is_measured_once_a_second_only_while_it_works(looks: list[int]) -> None:
    world = World("128MiB")
    world.loaded()
    world.watch.looked(PROCESS)

    def measured(count: int) -> int:
        looks.clear()
        assert [world.watch.looked(PROCESS) for _ in range(count)] == [""] * count
        return len(looks)

    assert measured(10) == 2
    changed: Any = msgspec.structs.replace
    world.reading = changed(world.reading, depth=1)
    assert measured(10) == 10, "a request runs"
    world.reading = changed(world.reading, depth=0)
    assert measured(1) == 1, "a request has ended since"
    assert measured(10) == 2
    world.watch.gone(PROCESS)
