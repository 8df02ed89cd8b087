"""Resource use of the service's processes: each process counts once, for any number of links."""

import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.process_usage import ProcessUsage
from shmserve.core.control.records import ProcessRecord
from tests.running_server import wait_until
from tests.servers import beside


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


def test_who_sleeps_and_takes_no_time_rests_and_who_is_stopped_does_not() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        reconciler: Any = SimpleNamespace(
            processes={"e": ProcessRecord("e", "executor", process.pid, 0.0)}
        )
        usage = ProcessUsage(0.0)

        def rests(now: float) -> bool:
            usage.look(reconciler, now)
            return usage.of(process.pid).rests

        try:
            assert not rests(1.0)  # nothing to compare with yet
            wait_until(lambda: rests(2.0), "it sleeps")
            assert not usage.look(reconciler, 3.0, idle=True)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: not rests(4.0), "it is stopped")
            assert usage.look(reconciler, 9.1, idle=True)
        finally:
            process.kill()


def test_processor_time_is_counted_once_and_stays_after_the_end() -> None:
    served = {("m/x", "1")}
    models = SimpleNamespace(has=lambda *of: of in served)
    reconciler: Any = SimpleNamespace(processes={}, models=models)
    usage = ProcessUsage(0.0)

    def spent() -> dict[tuple[str, str, str], float]:
        rows = [row for row in usage.report() if row.role != "coordinator"]
        assert all((row.private > 0) == bool(reconciler.processes) for row in rows)
        assert all(row.resident >= row.private for row in rows)
        return {(row.role, row.model, row.version): row.cpu_s for row in rows}

    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    with beside("-c", burn) as (_, process):
        record = ProcessRecord("e", "executor", process.pid, 0.0, "m/x/1/0")
        key = ("executor", "m/x", "1")
        for now in (1.0, 2.0):
            reconciler.processes = {"e": record}
            usage.look(reconciler, now)
            (found,) = spent().items()
            assert found[0] == key
            assert 0.1 < found[1] < 1.0
            reconciler.processes = {}  # its link is lost, and comes again
            usage.look(reconciler, now + 0.5)
            assert spent() == dict([found])
    usage.look(reconciler, 3.0)
    assert spent() == dict([found])
    assert usage._counted.keys() == {os.getpid()}
    served.clear()
    usage.look(reconciler, 4.0)
    assert spent() == {("executor", "", ""): found[1]}


def test_processes_that_are_older_than_the_coordinator_count_from_the_first_look() -> None:
    parent = ProcessRecord("h", "http", os.getppid(), 0.0)
    reconciler: Any = SimpleNamespace(processes={"h": parent})
    usage = ProcessUsage(0.0)
    usage.look(reconciler, 1.0)
    assert {row.role: row.cpu_s > 0 for row in usage.report()} == {
        "coordinator": True,  # this process
        "http": False,
    }


def test_where_nothing_happens_it_is_looked_at_again_when_a_process_comes() -> None:
    reconciler: Any = SimpleNamespace(processes={})
    usage = ProcessUsage(0.0)
    assert usage.look(reconciler, 1.0)
    assert not usage.look(reconciler, 2.0, idle=True)
    reconciler.processes["cli"] = ProcessRecord("cli", "cli", os.getppid(), 0.0)
    assert usage.look(reconciler, 3.0, idle=True)
