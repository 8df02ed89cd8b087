"""Messages of the data channel, frontend <-> executor; `messages` has their unions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from msgspec import Struct

from shmserve.protocol.control.message import Message

# What a request parameter can be (Open Inference Protocol V2, "parameters")
Parameter = bool | int | float | str


@final
class Descriptor(Struct, frozen=True, array_like=True, gc=False, tag=0):
    """A tensor's bytes in an arena: `segment` is an id of the arena's owner.

    `offset` and `nbytes` are bytes within the segment; `slot` and `generation`
    name the lease to give back.
    """

    segment: int
    slot: int
    generation: int
    offset: int
    nbytes: int


@final
class RegionRef(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A tensor's bytes in client memory: `offset` from the start of region number `region`."""

    region: int
    offset: int
    nbytes: int


class SegmentOffer(Struct, frozen=True, array_like=True, gc=False):
    """A segment the sender owns, whose read-only fd rides along (SCM_RIGHTS, same order)."""

    segment: int
    size: int


class WireTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a request or an answer.

    `alias` >= 0 (answers only): the bytes are those of the request's input of that
    index (among the inputs that lie in slots), at `at.offset` from its start; the frontend
    reads its own arena. In an answer a `RegionRef` says that the output lies in the client's
    memory already.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: Descriptor | RegionRef
    alias: int = -1


class OutputPlace(Struct, frozen=True, array_like=True, gc=False):
    """Where the client wants an output: at most `at.nbytes` bytes of its region."""

    name: str
    at: RegionRef


class CallingModel(Struct, frozen=True, array_like=True, gc=False):
    """A model that has asked for a request, and waits for its answer.

    Attributes:
        process: the executor that runs it.
        depth: how many models there are from the client's request on, this one included.
        blocked: that executor runs nothing else before it has the answer.
    """

    model: str
    process: str
    depth: int
    blocked: bool


@final
class Execute(Message, frozen=True):
    """Run one request. Times are CLOCK_MONOTONIC nanoseconds (0: no deadline)."""

    request: int
    id: str
    inputs: tuple[WireTensor, ...]
    outputs: tuple[str, ...]  # requested outputs, empty: all
    parameters: dict[str, Parameter]
    sent_ns: int
    deadline_ns: int
    release: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier outputs
    offers: tuple[SegmentOffer, ...] = ()
    dropped: tuple[int, ...] = ()  # segments of the sender that are no more
    places: tuple[OutputPlace, ...] = ()  # outputs that go into client memory
    credit: int = 0  # how many answers of a stream may be on their way; 0: one answer only
    callers: tuple[CallingModel, ...] = ()  # models that wait for the answer, the first one first
    caller_number: int = 0  # whose it is, for turns: `core.scheduling.caller_number`
    traceparent: str = ""  # what the model's own calls are part of, if it is traced in spans


class Cancel(Message, frozen=True):
    """The request is not wanted any more; if it has not started it never will."""

    request: int


class Credit(Message, frozen=True):
    """The frontend has consumed `answers` answers of a stream: as many more may come.

    `slots` are the output slots they held (slot, generation).
    """

    request: int
    answers: int
    slots: tuple[tuple[int, int], ...] = ()


class Release(Message, frozen=True):
    """Output slots the frontend is done with."""

    slots: tuple[tuple[int, int], ...]


class FrontendHello(Message, frozen=True):
    """First message of a data channel."""

    version: int
    process: str


class Timing(Struct, frozen=True, array_like=True, gc=False):
    """Nanoseconds per stage as the executor saw them."""

    queue: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0


class Copied(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of tensor data that the executor copied, by stage of the receipt."""

    batch: int = 0
    out: int = 0
    device: int = 0
    inputs: int = 0


@final
class Answer(Message, frozen=True):
    """Result of one `Execute`: outputs, or `error_code` and `error`.

    A stream has any number of answers, each but the last with `final` False; an answer
    with an error that is not final is the model's word about one response of many. A final
    answer without outputs or error only ends the stream.
    """

    request: int
    outputs: tuple[WireTensor, ...] = ()
    error_code: str = ""
    error: str = ""
    parameters: dict[str, Parameter] = {}  # noqa: RUF012 (msgspec makes a new one each time)
    timing: Timing = Timing()
    copied: Copied = Copied()
    offers: tuple[SegmentOffer, ...] = ()
    dropped: tuple[int, ...] = ()
    final: bool = True
    retained: tuple[int, ...] = ()  # inputs (as for alias) the model holds: they stay leased
    freed: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier retained inputs
    refused: bool = False  # the model's queue did not take it, or not let it wait any longer


class ExecutorHello(Message, frozen=True):
    """Reply to `FrontendHello`; the fd of the executor's status page rides along."""

    version: int
    process: str
    instance: str


def leases(outputs: Iterable[WireTensor]) -> list[tuple[int, int]]:
    """(slot, generation) of the outputs that lie in slots of the executor."""
    return [
        (tensor.at.slot, tensor.at.generation)
        for tensor in outputs
        if tensor.alias < 0 and isinstance(tensor.at, Descriptor)
    ]
