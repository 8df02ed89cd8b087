"""The exporter's end, and the spans still taken at the end."""

import os
import subprocess
import sys
import time

from shmserve.dispatch.traces.trace_spans import SpanSender
from shmserve.exporter import __main__ as exporter
from shmserve.protocol.control.span_messages import Span
from shmserve.transport import rundir
from shmserve.transport.processes import pidfd_open, spawn
from tests.running_server import wait_until
from tests.unit.exporter.test_collector import Scripted


def test_it_takes_spans_after_the_masters_end_until_it_is_told_to_end(tmp_path) -> None:
    run_dir = str(tmp_path / "run")
    rundir.prepare(run_dir)
    collector, sender = Scripted(200), SpanSender(run_dir)
    settings = {
        "NO_PROXY": "127.0.0.1",
        "SHMSERVE_RUN_DIR": run_dir,
        "SHMSERVE_TRACE_MODE": "opentelemetry",
        "SHMSERVE_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "60000",
    }
    with subprocess.Popen(["sleep", "600"]) as master:
        master_fd = pidfd_open(master.pid)
        assert master_fd is not None
        command = [sys.executable, "-m", "shmserve.exporter", "--number", "0"]
        command += ["--master-fd", str(master_fd)]
        made = spawn(command, keep=(master_fd,), environ={**os.environ, **settings})
        try:
            wait_until(lambda: (tmp_path / "run" / "exporter.sock").exists(), "the exporter")
            master.kill()
            master.wait()
            time.sleep(1.5)  # longer than it takes to notice
            sender.send([Span("late", "1" * 32, "2" * 16, "", 1, 2)])
            assert sender.dropped == 0
            made.terminate()
            assert made.wait(30) == 0
        finally:
            made.kill()
            made.wait()
            master.kill()
            os.close(master_fd)
            sender.close()
            collector.close()
    assert collector.paths == ["/v1/traces"]


def test_without_master_and_supervisor_it_ends_by_itself(monkeypatch) -> None:
    monkeypatch.setattr(exporter, "_WITHOUT_MASTER_S", 0.05)
    stop = exporter.Ending()
    assert not stop.begun
    stop.soon()
    assert stop.begun
    os.eventfd_read(stop.fd)  # the waiting thread was woken
    os.close(stop.fd)
