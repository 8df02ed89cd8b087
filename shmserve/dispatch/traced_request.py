"""Traced requests: data of a traced request until the trace is written."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from shmserve.core.live_settings import TraceSettings
from shmserve.core.registry import ModelEntry
from shmserve.core.trace_context import TraceContext
from shmserve.dispatch.receipt import Receipt
from shmserve.protocol.control.span_messages import Attribute
from shmserve.tensor.spec import NamedTensor

QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"  # activities
_MOST_TENSORS, _MOST_STEPS = 256, 1024  # limits of one trace, as streams may never end
Times = tuple[tuple[str, int], ...]  # stages and CLOCK_MONOTONIC nanoseconds


class TracedTensor(Struct, frozen=True):
    """Copy of a tensor, with its name, datatype and shape."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class Refusal(Struct, frozen=True):
    """A request that failed before reaching an executor.

    Attributes:
        failure: reason, as counted.
        error: reason, as text for people.
        attributes: properties of the request, and the status sent to the client.
        at_ns: time of the failure (CLOCK_MONOTONIC, nanoseconds).
        parent: context of the parent span, as sent by the client.
        own: context of the request's span.
    """

    failure: str
    error: str
    attributes: dict[str, Attribute]
    at_ns: int
    parent: TraceContext | None
    own: TraceContext


class Trace(Struct, eq=False):
    """A sampled request.

    Attributes:
        most_bytes: size limit of a kept tensor, in bytes.
        parent: context of the parent span, as sent by the client or set by the whole request.
        inner: true for a step of another request.
        own: context of the request's span; None if the trace goes to a file or the log.
        executor, times, receipt: set at the end of the request; a failed request may have no
            times.
        failure: reason of a failure, as counted.
        error: reason of a failure, as text for people.
        tensors: copies of tensors, if wanted.
        steps: traces of an ensemble's requests to its models.
    """

    entry: ModelEntry
    settings: TraceSettings
    request_id: str
    most_bytes: int
    parent: TraceContext | None = None
    inner: bool = False
    own: TraceContext | None = None
    executor: str = ""
    times: Times = ()
    receipt: Receipt | None = None
    failure: str = ""
    error: str = ""
    tensors: list[TracedTensor] = []
    steps: list[Trace] = []

    def add_tensors(self, activity: str, tensors: Iterable[NamedTensor]) -> None:
        """Keep copies of tensors, if wanted. Tensors that are too large or lie in client memory
        are skipped."""
        for tensor in tensors if self.settings.tensors else ():
            data = tensor.view
            if 0 < data.nbytes <= self.most_bytes and len(self.tensors) < _MOST_TENSORS:
                self.tensors.append(
                    TracedTensor(activity, tensor.name, tensor.datatype, tensor.shape, bytes(data))
                )

    def fail(self, reason: str, told: str) -> None:
        """Note the first failure of the request. `reason`: as counted; empty if the request was
        counted before."""
        self.failure = reason or self.failure
        if self.failure and not self.error:
            self.error = told

    def end(self, times: Times, receipt: Receipt) -> None:
        """Note the end of the request."""
        self.times, self.receipt, self.executor = times, receipt, receipt.executor

    def add_step(self, step: Trace) -> None:
        """Add a request to a model of this ensemble."""
        if len(self.steps) < _MOST_STEPS:
            self.steps.append(step)

    @property
    def whole(self) -> list[Trace]:
        """The trace and the traces of its steps, outer traces first."""
        return [self, *(inner for step in self.steps if step.times for inner in step.whole)]

    @property
    def nbytes(self) -> int:
        """Bytes of all kept tensors, including steps."""
        return sum(len(tensor.data) for trace in self.whole for tensor in trace.tensors)
