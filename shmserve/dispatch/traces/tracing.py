"""Traces: when a sampled request passed each stage, and with what tensors.

A request pays for sampling only while its model is traced (`ModelEntry.trace`). Traces are written
by the maintenance thread: to the exporter as spans (`trace_spans`) if `trace_mode` is
`opentelemetry`, to Triton's files where the setting `trace_file` names one (`trace_entries`), else
as lines of JSON in the server's log. Where their number is limited, or they
have ids, the coordinator says which of them may be, so that this holds for all processes together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

import msgspec

from shmserve import config
from shmserve.config import Settings
from shmserve.core.live_settings import UNLIMITED, TraceSettings
from shmserve.core.registry import ModelEntry
from shmserve.core.stats.failure_reasons import reason_of
from shmserve.core.trace_context import TraceContext, parse
from shmserve.core.trace_grants import GrantedTraces
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.traced_request import Refusal, Times, Trace
from shmserve.dispatch.traces.trace_entries import entries_of, line_of
from shmserve.dispatch.traces.trace_spans import SpanSource, new_span_id, new_trace_id
from shmserve.errors import ShmserveError
from shmserve.observe.logs import TRACES
from shmserve.observe.trace_files import TraceWriter
from shmserve.protocol.control.data_messages import Timing
from shmserve.protocol.control.span_messages import Attribute
from shmserve.transport.span_channel import SpanSender

MAX_TENSOR_BYTES = 64 << 10  # larger tensors are left out
_NO_MODEL = ""
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 64 << 20  # of their tensors
_TELL_NS = 60_000_000_000  # lost spans are told so often
_log = logging.getLogger(__name__)
_traces = logging.getLogger(TRACES)
_encode = msgspec.json.Encoder().encode

Take = Callable[[str, int, int], GrantedTraces]  # of (model, wanted, ids)


class Tracer:
    """Thread-safe; one per process.

    Args:
        process, protocol: what the traces of this process say of it.
        settings: `trace_file` and `trace_mode`.
    """

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
        self._granted: list[Trace] = []  # that are to be sent as spans
        self._refused: list[Refusal] = []  # the same
        self._refused_limited = False  # there may be only so many

    def begin(self, entry: ModelEntry, options: RunOptions) -> Trace | None:
        """The trace of a request that begins, if it is one of those to be traced. A step of an
        ensemble is within the ensemble's."""
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
        """A request failed before an executor was asked. It has a span where traces are spans, if
        it is one of those to be traced; files and the log have answered requests only."""
        if self._sender is None or not settings.active:
            return
        parent = parse(traceparent)
        if not self._sampled(_NO_MODEL, settings.rate, parent):
            return
        self._refused_limited = settings.count != UNLIMITED
        why, now_ns = reason_of(error).name.lower(), time.monotonic_ns()
        own = _within(parent) or TraceContext(new_trace_id(), new_span_id())
        refusal = Refusal(why, error.message, attributes, now_ns, parent, own)
        with self._lock:
            if len(self._refused) < _MOST_WAITING:
                self._refused.append(refusal)
            else:
                self._dropped += 1

    def _sampled(self, model: str, rate: int, parent: TraceContext | None) -> bool:
        """One of so many is; where there is a parent, what that says."""
        if parent is not None or not rate:
            return parent is not None and parent.sampled
        with self._lock:
            self._seen[model] += 1
            return self._seen[model] % rate == 0

    def end(self, trace: Trace) -> None:
        """A sampled request that is no step is over."""
        nbytes = trace.nbytes
        with self._lock:
            full = self._waiting_bytes + nbytes > _MOST_WAITING_BYTES
            if full or len(self._waiting) >= _MOST_WAITING:
                self._dropped += 1
            else:
                self._waiting.append(trace)
                self._waiting_bytes += nbytes

    def flush(self, take: Take) -> None:
        """Write what waits; `take` is asked where there is a limit, or a file."""
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
            _log.warning("%d traces are lost: more than could be written", dropped)

    def _refusals_granted(self, wanted: int, take: Take) -> int:
        """How many of so many there may be."""
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
            self._granted += traces  # all models' are sent at once, in the time of one
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
        """Let go of the way to the exporter."""
        if self._sender is not None:
            self._sender.close()


def _within(parent: TraceContext | None) -> TraceContext | None:
    """What is part of something else; None: that is in no trace."""
    return None if parent is None else TraceContext(parent.trace_id, new_span_id())


def timestamps(
    arrived: int, sent: int, timing: Timing | None, answered: int, ready: int, end: int
) -> Times:
    """CLOCK_MONOTONIC nanoseconds by stage, in Triton's names.

    Args:
        arrived: when the request came; `sent`: when it was complete, and an executor was asked.
        timing: of that; None: there was none, or several.
        answered: when the answer had come; `ready`: could be sent; `end`: was sent.
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
