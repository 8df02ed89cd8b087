"""Export of spans: sends the spans of the server's processes to the collector."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import shmserve
from shmserve.config import Settings
from shmserve.exporter.collector import Collector, Fate
from shmserve.exporter.span_queue import SpanQueue
from shmserve.log_fields import log_fields
from shmserve.protocol.control.span_messages import Span, Spans

_log = logging.getLogger(__name__)

_MAX_NUMBER = 1_000_000  # limit for both, spans and milliseconds
_TELL_S = 60.0  # shortest time between two log lines about losses
SCOPE = InstrumentationScope("shmserve", shmserve.__version__)


def queue_of_environment(environ: Mapping[str, str]) -> SpanQueue:
    """Return a queue as OpenTelemetry's variables for batches of spans describe it."""
    limit = _number(environ, OTEL_BSP_MAX_QUEUE_SIZE, 8192)
    batch = _number(environ, OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512)
    delay_ms = _number(environ, OTEL_BSP_SCHEDULE_DELAY, 5000)
    if batch > limit and environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE):
        text = "%s is more than %s: batches have at most %d spans"
        _log.warning(text, OTEL_BSP_MAX_EXPORT_BATCH_SIZE, OTEL_BSP_MAX_QUEUE_SIZE, limit)
    batch, delay_s = min(batch, limit), delay_ms / 1000
    about = log_fields(max_queue=limit, max_batch=batch, delay_s=delay_s)
    _log.info("spans are exported in batches", extra=about)
    return SpanQueue(limit, batch, delay_s)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable's number, or the default if the variable is unset or no positive number."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and 0 < int(text) <= _MAX_NUMBER:
        return int(text)
    _log.warning(
        "%s is not a whole number from 1 to %d: the exporter uses %d", name, _MAX_NUMBER, default
    )
    return default


class SpanExport:
    """Queue of spans, and the thread that exports them.

    Attributes:
        exported: number of spans that the collector has taken.
        refused: number of spans that the collector has refused for good.
        lost: number of spans dropped by the sending process, dropped by the full queue, or left at
            the end.
    """

    def __init__(self, settings: Settings, resource: Resource) -> None:
        self._resource = resource
        self._queue = queue_of_environment(os.environ)
        self._stop = threading.Event()
        self._collector: Collector[list[ReadableSpan]] = Collector(
            "spans", "traces", OTLPSpanExporter, settings, self._stop
        )
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self.exported = self.refused = self._unsent = self._came = 0
        self._over = False
        self._told, self._tell_at = 0, 0.0

    @property
    def lost(self) -> int:
        unexported = self._came - self.exported - self.refused
        return self._unsent + (unexported if self._over else self._queue.dropped)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Spans) -> None:
        """Queue the spans of a process."""
        self._unsent += message.dropped
        self._came += len(message.spans)
        self._queue.put(message.spans)

    def close(self, within_s: float) -> None:
        """Export the queued spans for up to `within_s` seconds, and count the rest as lost."""
        self._queue.close()
        self._thread.join(within_s)
        self._stop.set()
        self._over = True
        self._tell()

    def turn(self, now: float) -> None:
        """Log new losses, at most every `_TELL_S` seconds."""
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            self._tell()

    def _tell(self) -> None:
        total_lost = self.lost + self.refused
        if total_lost > self._told:
            so_far = log_fields(exported=self.exported, lost=self.lost, refused=self.refused)
            _log.warning("%d more spans are lost; in all", total_lost - self._told, extra=so_far)
            self._told = total_lost

    def _run(self) -> None:
        while (batch := self._queue.take()) and not self._stop.is_set():
            fate = self._collector.send([self.readable(span) for span in batch])
            if fate is Fate.TAKEN:
                self.exported += len(batch)
            elif fate is Fate.REFUSED:  # otherwise no time is left
                self.refused += len(batch)

    def readable(self, span: Span) -> ReadableSpan:
        """Return a span in the SDK's form."""
        parent = _context(span.trace_id, span.parent_id, span.server) if span.parent_id else None
        return ReadableSpan(
            span.name,
            _context(span.trace_id, span.span_id, False),
            parent,
            self._resource,
            span.attributes,
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error or None) if span.failed else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=SCOPE,
        )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED)
    )


def quiet() -> None:
    """Silence the SDK's log lines, which are frequent and less exact than the exporter's own."""
    for name in ("opentelemetry", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
