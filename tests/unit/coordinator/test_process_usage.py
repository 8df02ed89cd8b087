"""What the processes of the service use: each counts once, whatever links it has."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.process_usage import ProcessUsage
from shmserve.core.control.records import ProcessRecord


def test_a_calling_model_is_a_part_of_its_executor() -> None:
    pid = os.getppid()
    roles = ("executor", "model", "cli")
    reconciler: Any = SimpleNamespace(
        processes={role: ProcessRecord(role, role, pid, 0.0) for role in roles}
    )
    usage = ProcessUsage(0.0)
    usage.look(reconciler, 1.0)
    assert usage.of(pid).role == "executor"
    assert usage.count == 2  # and the coordinator
    assert [use.role for use in usage.list(reconciler, 1.0)] == ["coordinator", "executor"]
