"""Entry point of the exporter: ``python -m shmserve.exporter``, started by the supervisor, never
by hand."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from opentelemetry.sdk.resources import Resource
from prometheus_client.core import CounterMetricFamily, Metric
from setproctitle import setproctitle

from shmserve import config, ids
from shmserve.config import Settings
from shmserve.core.control.silence import period_s
from shmserve.dispatch.process.coordinator_client import CoordinatorClient
from shmserve.exporter.intake import Intake
from shmserve.exporter.metric_export import MetricExport
from shmserve.exporter.otlp_settings import resource_attributes
from shmserve.exporter.span_export import SpanExport, quiet
from shmserve.frontends.http.routes.scrape.prometheus_text import families
from shmserve.observe import flight_recorder, log_output, logs
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport import rundir
from shmserve.transport.link import Link, LinkHandlers
from shmserve.transport.processes import FileLock, follow

_log = logging.getLogger(__name__)

# seconds to export the rest at the end, and the part of this time for spans
_LAST_S, _LAST_SPANS_S = 3.0, 2.0
# seconds after the master's end, in which other processes may send their last spans
_WITHOUT_MASTER_S = 4.0
_TURN_S = 1.0


class Ending:
    """Event that ends the process; from then on the eventfd `fd` is readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._begun = threading.Event()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def set(self) -> None:
        """Set the event. Safe in a signal handler."""
        self._begun.set()
        os.eventfd_write(self.fd, 1)

    def soon(self) -> None:
        """Set the event after the master has ended: when the supervisor sends SIGTERM, or after
        `_WITHOUT_MASTER_S` seconds."""
        self._begun.wait(_WITHOUT_MASTER_S)
        self.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.exporter")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    arguments = parser.parse_args()
    settings = config.load()
    setproctitle("shmserve: exporter")
    logs.setup("exporter", settings.log_level, settings.log_format)
    quiet()
    stop = Ending()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master, which drains
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    follow(arguments.master_fd, stop.soon)
    lock = rundir.lock(config.run_dir(settings), f"exporter-{arguments.number}")
    if not lock.acquire():
        _log.info("another process exports")
        return 0
    try:
        _export(settings, lock, stop)
    finally:
        lock.release()
    return 0


def _export(settings: Settings, lock: FileLock, stop: Ending) -> None:
    run_dir = config.run_dir(settings)
    process = ids.new_process_id("exporter", os.getpid())
    flight_recorder.start(run_dir, process)
    resource = Resource.create(resource_attributes(settings, rundir.read_epoch(run_dir)))
    link = Link(run_dir, "exporter", process, LinkHandlers())
    spans = SpanExport(settings, resource)
    intake = Intake(run_dir, spans.put, stop.fd)
    numbers = None
    if settings.otlp_metrics_interval_s:
        collect = Numbers(run_dir, CoordinatorClient(link, process, settings), spans)
        numbers = MetricExport(settings, resource, collect)
    link.start()
    spans.start()
    if numbers is not None:
        numbers.start()
    try:
        _take(intake, spans, lock, stop, period_s(settings.watchdog_s))
        until = time.monotonic() + _LAST_S
        spans.close(_LAST_SPANS_S)
        if numbers is not None:  # the last metrics include the final counts of spans
            numbers.close(until - time.monotonic())
    finally:
        intake.close()
        link.close()


def _take(intake: Intake, spans: SpanExport, lock: FileLock, stop: Ending, beat_s: float) -> None:
    """Receive spans until `stop` is set and no sent span is left unread."""
    beat_at = 0.0
    while intake.turn(0.0 if stop.begun else min(_TURN_S, beat_s)) or not stop.begun:
        now = time.monotonic()
        spans.turn(now)
        if now >= beat_at:
            beat_at = now + beat_s
            if not lock.beat():
                _log.error("run_dir: files have been removed, ending for a successor")
                return


class Numbers:
    """Source of metrics: the families that a scrape of `/metrics` returns, and counts of exported
    spans. Raises the same errors as a scrape."""

    def __init__(self, run_dir: str, coordinator: CoordinatorClient, spans: SpanExport) -> None:
        self._registry = RegistryReader(run_dir)
        self._coordinator = coordinator
        self._spans = spans

    def __call__(self) -> Iterator[Metric]:
        yield from families(self._coordinator.report(), self._registry.current())
        what = "Spans of traced requests, by result, since the exporter's start"
        spans = CounterMetricFamily("shmserve_exporter_spans", what, labels=("result",))
        for result in ("exported", "lost", "refused"):
            spans.add_metric([result], getattr(self._spans, result))
        yield spans


if __name__ == "__main__":
    status = main()
    log_output.end()
    # A hanging export must not keep a finished process alive.
    os._exit(status)
