"""Tracing: records when sampled requests passed each stage, and their tensors.

A request pays for sampling only while its model is traced (`ModelEntry.trace`). The maintenance
thread writes traces: to the exporter as spans (`trace_spans`) if `trace_mode` is `opentelemetry`;
to Triton's files if the setting `trace_file` names a file (`trace_entries`); otherwise as lines of
JSON to the server's log. If traces are limited in number or have ids, the coordinator grants the
traces, so limits and ids hold for all processes together.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

import msgspec

from shmserve import config
from shmserve.config import Settings
from shmserve.core.live_settings import UNLIMITED, GrantedTraces, TraceSettings
from shmserve.core.registry import ModelEntry
from shmserve.core.stats.request_counters import reason_of
from shmserve.core.trace_context import TraceContext, parse
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.traced_request import Refusal, Times, Trace
from shmserve.dispatch.traces.trace_entries import entries_of, line_of
from shmserve.dispatch.traces.trace_spans import SpanSender, SpanSource, new_span_id, new_trace_id
from shmserve.errors import Code, ShmserveError
from shmserve.observe.logs import TRACES
from shmserve.observe.trace_files import TraceWriter
from shmserve.protocol.control.data_messages import Timing
from shmserve.protocol.control.span_messages import Attribute

MAX_TENSOR_BYTES = 64 << 10  # larger tensors are left out
_NO_MODEL = ""
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 64 << 20  # tensor bytes of waiting traces
_DENIED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)  # not counted: no model is at fault
_TELL_NS = 60_000_000_000  # period of log lines about lost spans
_log = logging.getLogger(__name__)
_traces = logging.getLogger(TRACES)
_encode = msgspec.json.Encoder().encode

Take = Callable[[str, int, int], GrantedTraces]  # of (model, wanted, ids)


class Tracer:
    """Traces of one process. Thread-safe. `process`: process id to record in traces. `protocol`:
    protocol of the process's clients. `settings`: `trace_file` and `trace_mode`."""

    def __init__(self, process: str, protocol: str, settings: Settings) -> None:
        self._process = process
        self._protocol = protocol
        self._writer = TraceWriter(settings) if settings.trace_file else None
        self._sender: SpanSender | None = None
        if settings.trace_mode == "opentelemetry":
            self._sender = SpanSender(config.run_dir(settings))
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._waiting: deque[Trace] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._told_lost = self._tell_ns = 0
        self._granted: list[Trace] = []  # to be sent as spans
        self._refused: list[Refusal] = []  # to be sent as spans
        self._refused_limited = False  # true if the number of traces is limited

    def begin(self, entry: ModelEntry, options: RunOptions) -> Trace | None:
        """Return the trace of a new request, or None if the request is not sampled. The trace of
        an ensemble's step belongs to the ensemble's trace."""
        known = options.request_id, MAX_TENSOR_BYTES
        if (whole := options.trace) is not None:
            parent = whole.own or whole.parent
            step = Trace(entry, whole.settings, *known, parent, True, _within(whole.own))
            whole.add_step(step)
            return step
        parent, settings = parse(options.traceparent), entry.trace
        assert settings is not None
        spans = self._sender is not None
        if not self._sampled(entry.spec.name, settings.rate, parent if spans else None):
            return None
        own = _within(parent) or TraceContext(new_trace_id(), new_span_id()) if spans else None
        return Trace(entry, settings, *known, parent, own=own)

    def refused(
        self,
        error: ShmserveError,
        traceparent: str,
        attributes: dict[str, Attribute],
        settings: TraceSettings,
    ) -> None:
        """Note a request that failed before reaching an executor. A sampled request gets a span if
        traces are spans. Trace files and the log contain only answered requests."""
        if self._sender is None or not settings.active:
            return
        parent = parse(traceparent)
        if not self._sampled(_NO_MODEL, settings.rate, parent):
            return
        self._refused_limited = settings.count != UNLIMITED
        denied = error.code in _DENIED
        reason = (error.code if denied else reason_of(error).name).lower()
        now_ns = time.monotonic_ns()
        own = _within(parent) or TraceContext(new_trace_id(), new_span_id())
        refusal = Refusal(reason, error.message, attributes, now_ns, parent, own)
        with self._lock:
            if len(self._refused) < _MOST_WAITING:
                self._refused.append(refusal)
            else:
                self._dropped += 1

    def _sampled(self, model: str, rate: int, parent: TraceContext | None) -> bool:
        """Return True for one in `rate` requests, or for none if `rate` is 0. A request with a
        parent follows the parent's sampling."""
        if parent is not None or not rate:
            return parent is not None and parent.sampled
        with self._lock:
            self._seen[model] += 1
            return self._seen[model] % rate == 0

    def end(self, trace: Trace) -> None:
        """Queue the trace of a finished request. Steps are queued with their ensemble."""
        nbytes = trace.nbytes
        with self._lock:
            full = self._waiting_bytes + nbytes > _MOST_WAITING_BYTES
            if full or len(self._waiting) >= _MOST_WAITING:
                self._dropped += 1
            else:
                self._waiting.append(trace)
                self._waiting_bytes += nbytes

    def flush(self, take: Take) -> None:
        """Write queued traces. `take` is called if traces are limited or go to a file."""
        with self._lock:
            if not (self._waiting or self._dropped or self._refused):
                return
            refused, self._refused = self._refused, []
            waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
            dropped, self._dropped = self._dropped, 0
        by_model: dict[str, list[Trace]] = {}
        for trace in waiting:
            by_model.setdefault(trace.entry.spec.name, []).append(trace)
        for model, traces in by_model.items():
            try:
                self._write(model, traces, take)
            except ShmserveError as ex:
                _log.warning("traces of model %s are lost: %s", model, ex)
        if refused and self._refused_limited:
            refused = refused[: self._refusals_granted(len(refused), take)]
        if self._sender is not None and (self._granted or refused):
            traces, self._granted = self._granted, []
            self._send(traces, refused, self._sender)
        if dropped:
            _log.warning("%d traces are lost: they came faster than they could be written", dropped)

    def _refusals_granted(self, wanted: int, take: Take) -> int:
        """Return how many of `wanted` traces may be written."""
        try:
            return take(_NO_MODEL, wanted, wanted).count
        except ShmserveError as ex:
            _log.warning("traces of refused requests are lost: %s", ex)
            return 0

    def _write(self, model: str, traces: list[Trace], take: Take) -> None:
        granted = GrantedTraces(len(traces))
        if self._writer is not None or traces[0].settings.count != UNLIMITED:
            granted = take(model, len(traces), sum(len(trace.whole) for trace in traces))
        traces = traces[: granted.count]
        if self._sender is not None:
            self._granted += traces  # all models' traces share one send, limited to 0.5 s
            return
        if self._writer is None:
            for trace in traces:
                line = line_of(trace, self._protocol, self._process)
                _traces.info("trace %s", _encode(line).decode())
            return
        number, ahead = granted.first, iter(traces)
        for place, count in granted.places:
            entries: list[bytes] = []
            for trace in islice(ahead, count):
                entries += map(_encode, entries_of(trace, number, self._protocol))
                number += len(trace.whole)
            self._writer.append(place, entries)

    def _send(self, traces: list[Trace], refused: list[Refusal], sender: SpanSender) -> None:
        now_ns = time.monotonic_ns()
        wall_ns = time.time_ns() - now_ns
        source = SpanSource(self._process, self._protocol, wall_ns)
        spans = [span for trace in traces for span in source.spans(trace)]
        sender.send(spans + list(map(source.refused, refused)))
        lost = sender.dropped - self._told_lost
        if lost and now_ns >= self._tell_ns:
            _log.warning("%d spans are lost: the exporter is away, or has no room", lost)
            self._told_lost, self._tell_ns = sender.dropped, now_ns + _TELL_NS

    def close(self) -> None:
        """Close the channel to the exporter."""
        if self._sender is not None:
            self._sender.close()


def _within(parent: TraceContext | None) -> TraceContext | None:
    """Return a new span within the parent, or None without a parent."""
    return None if parent is None else TraceContext(parent.trace_id, new_span_id())


def timestamps(
    arrived: int, sent: int, timing: Timing | None, answered: int, ready: int, end: int
) -> Times:
    """Return CLOCK_MONOTONIC nanoseconds by stage, under Triton's names.

    Args:
        arrived: arrival of the request.
        sent: time when the request was complete and was sent to an executor.
        timing: stages at the executor; None for no executor or several.
        answered: arrival of the answer.
        ready: time when the answer was ready to be sent.
        end: time when the answer had been sent.
    """
    begun = [("RECV_START", arrived), ("RECV_END", sent), ("REQUEST_START", sent)]
    if timing is not None:
        start = sent + timing.queue
        input_end = start + timing.input
        output_start = input_end + timing.infer
        compute_end = output_start + timing.output
        begun += [
            ("QUEUE_START", sent),
            ("COMPUTE_START", start),
            ("COMPUTE_INPUT_END", input_end),
            ("COMPUTE_OUTPUT_START", output_start),
            ("COMPUTE_END", compute_end),
        ]
        answered = max(answered, compute_end)
    ended = [("INFER_RESPONSE_COMPLETE", answered), ("REQUEST_END", answered)]
    ready = max(ready, answered)
    return (*begun, *ended, ("SEND_START", ready), ("SEND_END", max(end, ready)))
