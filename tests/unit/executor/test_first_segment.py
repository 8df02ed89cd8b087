"""First segment of an executor's memory, and the report to the coordinator."""

from __future__ import annotations

from pathlib import Path

from shmserve import repository
from shmserve.executor.custom_metrics import registry
from shmserve.executor.process.__main__ import Executor

MODEL = Path(__file__).resolve().parents[3] / "workers" / "identity"


def test_the_coordinator_is_told_what_an_executor_begins_with_and_keeps(rig_with, monkeypatch):
    # the executor's page ends with the test
    monkeypatch.setattr(registry, "publish", lambda *_: None)
    rig = rig_with()
    (instance,) = repository.read_folder(str(MODEL)).instances()
    executor = Executor(instance, "executor-cafe0123", rig.settings)
    memory = executor.memory
    try:
        executor.link.start()
        memory.prepare()
        (hello,) = (h for h in rig.coordinator.hellos if h.role == "executor")
        assert hello.first_bytes == memory.held_bytes
        memory.reclaim(memory.reserve(8 << 20))
        memory.trim()
        assert memory.held_bytes == hello.first_bytes
    finally:
        executor.link.close()
        memory.close()
        executor.status.close()
