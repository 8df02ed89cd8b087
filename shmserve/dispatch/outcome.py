"""Options and outcomes of calls."""

from collections.abc import Callable

from msgspec import Struct

from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.core.registry import Snapshot
from shmserve.dispatch.traced_request import Trace
from shmserve.errors import Code, QueueFull, ShmserveError, of_run
from shmserve.protocol.control.data_messages import Answer, CallingModel, OutputPlace, Parameter


class StreamLimits(Struct, frozen=True):
    """Time limits of a stream. `answer_s`: longest wait for each answer after the first, in
    seconds. `began_ns`: start of the whole stream (CLOCK_MONOTONIC, nanoseconds)."""

    answer_s: float
    began_ns: int


class RunOptions(Struct, frozen=True):
    """Options of a request besides its inputs.

    Attributes:
        timeout_s: longest wait for the answer, in seconds; None for `request_timeout_s`.
        request_id: id chosen by the client.
        outputs: names of the requested outputs; empty for all outputs.
        places: places in client memory for outputs.
        on_wait: called about once a second while no answer comes. Returns False if the client no
            longer wants the answer.
        on_sent: called when the request has been sent to an executor without being split into
            steps. The executor takes later requests after this request.
        callers: models that wait for the answer, if a model makes the call.
        caller_number: number of the caller, for turns and shares.
        sequence_owner: owner of the sequence that the parameters name, as in `SequenceName`.
        stream: time limits for later answers of a stream; None for the limit of the first answer.
        step: true for an ensemble's step, which is traced only if the ensemble is (`trace`).
        began: registry when the outermost ensemble's run began; None outside of ensembles.
        trace: trace of the ensemble, if traced.
        traceparent: header as sent by the client (W3C Trace Context), read only for traces.
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
    sequence_owner: int = UNKNOWN_CALLER
    step: bool = False
    began: Snapshot | None = None
    trace: Trace | None = None
    traceparent: str = ""


NO_OPTIONS = RunOptions()


class OutputTensor(Struct, frozen=True):
    """Output of a request. `view`: bytes in shared memory, valid until `Call.close`; empty if the
    output went into client memory. `aliased`: true if the output lies in an input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview
    aliased: bool = False


class Outcome(Struct, frozen=True):
    """Answer to a request. `final` and `error` matter only in streams, because `execute` raises
    errors."""

    outputs: tuple[OutputTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    final: bool = True
    error: ShmserveError | None = None


def error_of(answer: Answer) -> ShmserveError:
    """Return the error in an executor's answer. With `refused`, the request has not run."""
    code, text = Code(answer.error_code), answer.error
    return QueueFull(text) if answer.refused else of_run(code, text)
