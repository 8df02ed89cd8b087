"""What a call is asked and what it gets."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from shmserve.dispatch.traced_request import Trace
from shmserve.errors import Code, QueueFull, ShmserveError, of_run
from shmserve.protocol.control.data_messages import Answer, CallingModel, OutputPlace, Parameter


class StreamLimits(Struct, frozen=True):
    """`answer_s`: how long each answer after the first is waited for; `began_ns`: since when
    the whole stream counts (CLOCK_MONOTONIC)."""

    answer_s: float
    began_ns: int


class RunOptions(Struct, frozen=True):
    """What a request says besides its inputs.

    Attributes:
        timeout_s: how long the answer is waited for; None: `request_timeout_s`.
        request_id: the client's.
        outputs: names of those wanted; empty: all.
        places: where outputs go that the client wants in its own memory.
        on_wait: called about once a second while nothing comes; when it returns False nobody
            wants the answer any more.
        on_sent: called when an executor has been sent it, if it is sent to one as it is: what is
            sent to the same one from then on is taken after it.
        callers: models that wait for the answer, if it is a model that asks.
        caller_number: whose it is, where callers take turns and have shares.
        stream: how long a stream's later answers are waited for; None: as the first.
        step: it is for an ensemble's step, and traced if that is: `trace`.
        traceparent: as the client sent it (W3C Trace Context); it is looked at by traces only.
    """

    request_id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    places: tuple[OutputPlace, ...] = ()
    on_wait: Callable[[], bool] | None = None
    on_sent: Callable[[], None] | None = None
    timeout_s: float | None = None
    callers: tuple[CallingModel, ...] = ()
    stream: StreamLimits | None = None
    caller_number: int = 0
    step: bool = False
    trace: Trace | None = None
    traceparent: str = ""


NO_OPTIONS = RunOptions()


class OutputTensor(Struct, frozen=True):
    """One output; `view` are its bytes in shared memory, valid until `Call.close`.

    An output that went into client memory has an empty view. `aliased`: it lies in an input.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview
    aliased: bool = False


class Outcome(Struct, frozen=True):
    """An answer. `final` and `error` matter in streams only: `execute` raises errors."""

    outputs: tuple[OutputTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    final: bool = True
    error: ShmserveError | None = None


def error_of(answer: Answer) -> ShmserveError:
    """What an executor's answer says instead of outputs; `refused`: the request has not run."""
    code, text = Code(answer.error_code), answer.error
    return QueueFull(text) if answer.refused else of_run(code, text)
