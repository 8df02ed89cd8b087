"""Trace spans: a trace as OpenTelemetry spans, with Triton's names and the costs of the request.

Requests never wait for the channel to the exporter. A process sends spans in its maintenance, for
half a second at most. Without an exporter, or without room, the process drops the spans and counts
them. The exporter's queue is bounded as well.
"""

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct

from shmserve.dispatch.traced_request import Refusal, Trace
from shmserve.errors import PeerDied
from shmserve.protocol.control.span_messages import Attribute, Span, Spans, encode
from shmserve.transport import rundir
from shmserve.transport.channel import MAX_MESSAGE, Channel

WHOLE = "InferRequest"
_LONGEST = 256  # characters of an attribute
_LONGEST_ERROR = 512
_COMPUTE = (  # parts of `compute`, with start and end
    ("compute_input", "COMPUTE_START", "COMPUTE_INPUT_END"),
    ("compute_infer", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("compute_output", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
)
_CONNECT_S = 0.5
_ROOM_S = 0.5  # limit of one flush, which waits for the exporter to read
_TICK_S = 0.005
_MOST_TOGETHER = 100  # spans in one message


class SpanSource(Struct, frozen=True):
    """Origin of spans. `process`: process id. `protocol`: protocol of the process's clients, or
    `model` if models are the callers. `wall_ns`: difference of the wall clock to CLOCK_MONOTONIC,
    in nanoseconds."""

    process: str
    protocol: str
    wall_ns: int

    def spans(self, trace: Trace) -> Iterator[Span]:
        """Yield the spans of a finished request, including its steps."""
        assert trace.own is not None
        parent = trace.parent.span_id if trace.parent is not None else ""
        if self.protocol != "model":
            times = dict(trace.times)
            attributes: dict[str, Attribute] = {
                "shmserve.transport": self.protocol,
                "shmserve.process": self.process,
            }
            whole = self._span(trace, WHOLE, "RECV_START", "SEND_END", parent, attributes, True)
            yield whole
            parent = whole.span_id
            yield self._span(trace, "receive", "RECV_START", "RECV_END", parent)
            if not trace.failure and times["SEND_END"] > times["SEND_START"]:
                yield self._span(trace, "send", "SEND_START", "SEND_END", parent)
        yield from self._model(trace, parent)

    def refused(self, refusal: Refusal) -> Span:
        """Return the span of a request that failed before reaching an executor."""
        attributes = {
            "shmserve.transport": self.protocol,
            "shmserve.process": self.process,
            **refusal.attributes,
            "error.type": refusal.failure,
        }
        at_ns, parent = refusal.at_ns + self.wall_ns, refusal.parent
        return Span(
            WHOLE,
            refusal.own.trace_id,
            refusal.own.span_id,
            parent.span_id if parent is not None else "",
            *(at_ns, at_ns, True, attributes, True),
            refusal.error[:_LONGEST_ERROR],
        )

    def _model(self, trace: Trace, parent: str) -> Iterator[Span]:
        """Yield the span of a model, and the spans within."""
        assert trace.own is not None
        spec, own = trace.entry.spec, trace.own.span_id
        yield self._span(
            *(trace, spec.name, "REQUEST_START", "REQUEST_END", parent, _attributes(trace), True),
            span_id=own,
        )
        if any(name == "COMPUTE_START" for name, _ in trace.times):
            yield self._span(trace, "queue", "QUEUE_START", "COMPUTE_START", own)
            compute = self._span(trace, "compute", "COMPUTE_START", "COMPUTE_END", own)
            yield compute
            for name, start, end in _COMPUTE:
                yield self._span(trace, name, start, end, compute.span_id)
        for step in trace.steps:
            if step.times:
                yield from self._model(step, own)

    def _span(
        self,
        trace: Trace,
        name: str,
        start: str,
        end: str,
        parent: str,
        attributes: dict[str, Attribute] | None = None,
        tells_error: bool = False,
        span_id: str = "",
    ) -> Span:
        assert trace.own is not None
        times = dict(trace.times)
        return Span(
            name[:_LONGEST],
            trace.own.trace_id,
            span_id or new_span_id(),
            parent,
            times[start] + self.wall_ns,
            times[end] + self.wall_ns,
            name == WHOLE,
            attributes or {},
            tells_error and bool(trace.failure),
            trace.error[:_LONGEST_ERROR] if tells_error else "",
        )


def _attributes(trace: Trace) -> dict[str, Attribute]:
    """Return the attributes of a model's span, with Triton's names where defined."""
    spec, receipt = trace.entry.spec, trace.receipt
    attributes: dict[str, Attribute] = {
        "triton.model_name": spec.name,
        "triton.model_version": int(spec.version),
    }
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id[:_LONGEST]
    if trace.executor:
        attributes["shmserve.executor"] = trace.executor[:_LONGEST]
    if receipt is not None:
        attributes["shmserve.copied_bytes.in"] = receipt.copied_in
        attributes["shmserve.copied_bytes.batch"] = receipt.copied_batch
        attributes["shmserve.copied_bytes.out"] = receipt.copied_out
        attributes["shmserve.copied_bytes.device"] = receipt.copied_device
    if trace.failure:
        attributes["error.type"] = trace.failure
    return attributes


def new_span_id() -> str:
    return os.urandom(8).hex()


def new_trace_id() -> str:
    return os.urandom(16).hex()


class SpanSender:
    """Sender of spans, for one thread of a process. `dropped`: number of unsent spans so far."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, rundir.EXPORTER_SOCKET)
        self._channel: Channel | None = None
        self._untold = 0  # dropped spans that the exporter was not told of
        self.dropped = 0

    def send(self, spans: Sequence[Span]) -> None:
        """Send spans, or drop them."""
        deadline = time.monotonic() + _ROOM_S
        ahead = iter(spans)
        while some := tuple(islice(ahead, _MOST_TOGETHER)):
            self._send(some, deadline)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self, spans: tuple[Span, ...], deadline: float) -> None:
        data = encode(Spans(spans, self._untold))
        if len(data) > MAX_MESSAGE and len(spans) > 1:
            half = len(spans) // 2
            self._send(spans[:half], deadline)
            self._send(spans[half:], deadline)
        elif len(data) <= MAX_MESSAGE and self._pass(data, deadline):
            self._untold = 0
        else:
            self._untold += len(spans)
            self.dropped += len(spans)

    def _pass(self, data: bytes, deadline: float) -> bool:
        try:
            if self._channel is None:
                self._channel = Channel.connect(self._path, _CONNECT_S)
            while not self._channel.send(data, wait=False):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_TICK_S)
        except PeerDied:
            self.close()
            return False
        return True
