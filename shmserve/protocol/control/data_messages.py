"""Messages of the data channel, frontend <-> executor. `messages` has the unions."""

from collections.abc import Iterable
from typing import final

from msgspec import Struct

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.protocol.control.message import Message

# Types of a request parameter (Open Inference Protocol V2, "parameters")
Parameter = bool | int | float | str


@final
class Descriptor(Struct, frozen=True, array_like=True, gc=False, tag=0):
    """Place of a tensor's bytes in an arena. `segment` is an id given by the arena's owner.
    `offset` and `nbytes` are bytes within the segment. `slot` and `generation` name the lease to
    give back."""

    segment: int
    slot: int
    generation: int
    offset: int
    nbytes: int


@final
class RegionRef(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """Place of a tensor's bytes in client memory: `offset` bytes into region `region`."""

    region: int
    offset: int
    nbytes: int


class SegmentOffer(Struct, frozen=True, array_like=True, gc=False):
    """A segment of the sender. A read-only fd rides along (SCM_RIGHTS, in the offers' order)."""

    segment: int
    size: int


class WireTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a request or an answer.

    In an answer, `alias` >= 0 means that the output's bytes are bytes of a request input. `alias`
    is then the input's index among the inputs that lie in slots, and `at.offset` counts from the
    input's start. The frontend reads these bytes in its own arena. In an answer, a `RegionRef`
    means that the output lies in the client's memory already.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: Descriptor | RegionRef
    alias: int = -1


class OutputPlace(Struct, frozen=True, array_like=True, gc=False):
    """Client memory for an output: at most `at.nbytes` bytes of the client's region."""

    name: str
    at: RegionRef


class CallingModel(Struct, frozen=True, array_like=True, gc=False):
    """A model that has made a request of another model and waits for the answer.

    Attributes:
        process: executor that runs the calling model.
        depth: number of models from the client's request down to and including this model.
        blocked: the executor runs nothing else until the answer arrives.
    """

    model: str
    process: str
    depth: int
    blocked: bool


@final
class Execute(Message, frozen=True):
    """Order to run one request. Times are CLOCK_MONOTONIC nanoseconds (0: no deadline)."""

    request: int
    id: str
    inputs: tuple[WireTensor, ...]
    outputs: tuple[str, ...]  # requested outputs; empty: all
    parameters: dict[str, Parameter]
    sent_ns: int
    deadline_ns: int
    release: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier outputs
    offers: tuple[SegmentOffer, ...] = ()
    dropped: tuple[int, ...] = ()  # segments that the sender has freed
    places: tuple[OutputPlace, ...] = ()  # outputs to be written into client memory
    credit: int = 0  # answers of a stream that may be on their way; 0: a single answer
    callers: tuple[CallingModel, ...] = ()  # models that wait for the answer, outermost first
    caller_number: int = 0  # the caller, for fair turns (`core.caller`)
    # parent span of the model's own calls, if the request is traced in spans
    traceparent: str = ""
    # sequence that the request names; the executor may give the model another `sequence_id`
    sequence: SequenceName | None = None


class Cancel(Message, frozen=True):
    """Order to cancel a request. A request that has not started never starts."""

    request: int


class Credit(Message, frozen=True):
    """Credit for a stream: the frontend has consumed `answers` answers, so as many more may come.
    `slots`: (slot, generation) of the output slots of the consumed answers."""

    request: int
    answers: int
    slots: tuple[tuple[int, int], ...] = ()


class Release(Message, frozen=True):
    """Output slots that the frontend has finished reading, as (slot, generation)."""

    slots: tuple[tuple[int, int], ...]


class FrontendHello(Message, frozen=True):
    """First message of a data channel."""

    version: int
    process: str


class Timing(Struct, frozen=True, array_like=True, gc=False):
    """Nanoseconds per stage, measured by the executor."""

    queue: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0


class Copied(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of tensor data that the executor copied, per stage of the receipt."""

    batch: int = 0
    out: int = 0
    device: int = 0
    inputs: int = 0


@final
class Answer(Message, frozen=True):
    """Result of an `Execute`: outputs, or `error_code` and `error`.

    A stream has any number of answers; `final` is False in all but the last. An error in an answer
    that is not final is the model's error response for a single answer of the stream. A final
    answer without outputs and error only ends the stream.
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
    # inputs (indexed as for alias) that the model still holds: their slots stay leased
    retained: tuple[int, ...] = ()
    freed: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier retained inputs
    refused: bool = False  # the model's queue refused the request, or timed it out


class ExecutorHello(Message, frozen=True):
    """Reply to `FrontendHello`. The fd of the executor's status page rides along."""

    version: int
    process: str
    instance: str


def leases(outputs: Iterable[WireTensor]) -> list[tuple[int, int]]:
    """Return (slot, generation) of the outputs that lie in slots of the executor."""
    return [
        (tensor.at.slot, tensor.at.generation)
        for tensor in outputs
        if tensor.alias < 0 and isinstance(tensor.at, Descriptor)
    ]
