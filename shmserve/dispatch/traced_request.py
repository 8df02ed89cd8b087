"""A request that is traced, while it runs and until it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from shmserve.core.live_settings import TraceSettings
from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry
from shmserve.core.trace_context import TraceContext
from shmserve.dispatch.receipt import Receipt
from shmserve.protocol.control.data_messages import Descriptor, WireTensor
from shmserve.protocol.control.span_messages import Attribute
from shmserve.tensor.named_tensor import NamedTensor

QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"  # activities
_MOST_TENSORS, _MOST_STEPS = 256, 1024  # of one trace: streams may go on for ever
Times = tuple[tuple[str, int], ...]  # stages and CLOCK_MONOTONIC nanoseconds


class SlotInput(Struct, frozen=True):
    """An input of a call."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview


def inputs_in(slots: Iterable[Slot], inputs: Iterable[WireTensor]) -> Iterator[SlotInput]:
    """The inputs of a call that lie in its slots."""
    views = (slot.view for slot in slots)
    for tensor in inputs:
        if type(tensor.at) is Descriptor:
            yield SlotInput(tensor.name, tensor.datatype, tensor.shape, next(views))


class TracedTensor(Struct, frozen=True):
    """A copy of a tensor, and what it was."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class Refusal(Struct, frozen=True):
    """A request that failed before an executor was asked.

    Attributes:
        failure, error: why: as it is counted, and for people.
        attributes: what it asked for, and the status that its client got.
        at_ns: when (CLOCK_MONOTONIC).
        parent: what it is part of, as the client says; own: as what others are part of it.
    """

    failure: str
    error: str
    attributes: dict[str, Attribute]
    at_ns: int
    parent: TraceContext | None
    own: TraceContext


class Trace(Struct, eq=False):
    """One sampled request.

    Attributes:
        most_bytes: of a tensor that is kept.
        parent: what it is part of, as the client or the whole request says.
        inner: it is a step of another one.
        own: as what others are part of it; None: it is for a file or the log.
        executor, times, receipt: told when it is over; without times it has failed.
        failure, error: why it has, if it has: as it is counted, and for people.
        tensors: copies of them, where they are wanted.
        steps: of an ensemble, requests to its models.
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
        """Keep those that are not too large, and do not lie in client memory, if any."""
        for tensor in tensors if self.settings.tensors else ():
            data = tensor.view
            if 0 < data.nbytes <= self.most_bytes and len(self.tensors) < _MOST_TENSORS:
                self.tensors.append(
                    TracedTensor(activity, tensor.name, tensor.datatype, tensor.shape, bytes(data))
                )

    def fail(self, reason: str, told: str) -> None:
        """The request has failed, if it has not before. `reason`: as it is counted; else empty."""
        self.failure = reason or self.failure
        if self.failure and not self.error:
            self.error = told

    def end(self, times: Times, receipt: Receipt) -> None:
        """The request is over."""
        self.times, self.receipt, self.executor = times, receipt, receipt.executor

    def add_step(self, step: Trace) -> None:
        """A request to a model of this ensemble begins."""
        if len(self.steps) < _MOST_STEPS:
            self.steps.append(step)

    @property
    def whole(self) -> list[Trace]:
        """Itself and what is within it, the outer ones first."""
        return [self, *(inner for step in self.steps if step.times for inner in step.whole)]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(len(tensor.data) for trace in self.whole for tensor in trace.tensors)
