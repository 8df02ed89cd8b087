"""Runner: runs the requests chosen by a scheduler, and returns their outcomes.

`RequestRunner` runs one request, `BatchRunner` a batch, `StreamRunner` requests of a decoupled
model, whose answers are streams. `SequenceRunner` surrounds a batch or stream runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from shmserve.errors import Code, Internal, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Response
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.request import ExecutorRequest, Outputs
from shmserve.protocol.control.data_messages import Answer, Execute
from shmserve.shm.client_region import Shrunk

log = logging.getLogger(__name__)

Requested = tuple[FrontendConnection, Execute]
Key = tuple[FrontendConnection, int]  # connection, and number of the request on it
IsCancelled = Callable[[FrontendConnection, int], bool]


class RunOutcome(Struct, eq=False):
    """Outcome of one request after a run.

    Attributes:
        answer: answer to send; None if there is no answer yet, or the stream answers.
        segments: the executor's segments that the answer names.
        leases: output slots to be leased to the frontend with the answer.
        violation: why the frontend broke the protocol, if it did; such a request gets no answer.
        rescheduled: True if the model wants to run the request again; there is no answer yet.
        uncounted: True if the run is to be counted once the answer is sent.
        stream_failed: True if the request's stream has ended with an error, or was never opened.
    """

    connection: FrontendConnection
    message: Execute
    answer: Answer | None = None
    segments: Sequence[int] = ()
    leases: Sequence[tuple[int, int]] = ()
    violation: str = ""
    rescheduled: bool = False
    stream_failed: bool = False
    uncounted: bool = False

    @property
    def has_failed(self) -> bool:
        """True after an error. False for a request that has ended well or will run again."""
        has_error = self.answer is not None and bool(self.answer.error_code)
        return has_error or bool(self.violation) or self.stream_failed

    def fail(self, error: ShmserveError) -> None:
        """End the request with an error. Only the text is kept: a traceback would keep views."""
        if isinstance(error, ProtocolViolation):
            self.violation = error.message
        else:
            number = self.message.request
            self.answer = Answer(number, error_code=error.code, error=error.message)

    def cancel(self, answer: Answer | None) -> None:
        """End a rescheduled request instead of running it again."""
        self.rescheduled = False
        self.answer = answer


class Runner(Protocol):
    """Runs requests on one loaded backend. Every error becomes an outcome."""

    def run(self, batch: Sequence[Requested], now_ns: int) -> Sequence[RunOutcome]:
        """Run requests together and count them. Return an outcome for each request, in the same
        order."""
        ...

    def withdraw(self, connection: FrontendConnection, answer: Answer) -> Answer | None:
        """Drop a waiting request, which may have run before; `answer` has the reason. Return the
        complete answer, or None if a stream tells the frontend."""
        ...

    def rest(self) -> None:
        """Release what was prepared for the next request, because no request is to run."""
        ...


def as_error(ex: BaseException) -> ShmserveError:
    """Return an exception of a backend as the error for clients. Unexpected exceptions are logged,
    except MemoryError and SystemExit."""
    if isinstance(ex, ShmserveError):
        return ex
    if isinstance(ex, MemoryError):
        return Internal("the model ran out of memory")
    if isinstance(ex, SystemExit):  # sys.exit in a model must not end the executor
        return Internal("the model tried to exit")
    log.error("the backend failed", exc_info=ex)
    return Internal("the model failed; the server's log tells why")


def error_of_placing(
    request: ExecutorRequest, outputs: Outputs, response: Response
) -> ShmserveError | None:
    """Place a response. Return the response's error, or the error of placing the outputs, or None.
    Callers keep only the text, because a traceback would keep views of inputs."""
    try:
        if response.error is None:
            outputs.place(response)
    except Shrunk as ex:
        request.workspace.regions.shrunk(ex)
        return ex
    except Exception as ex:  # also an array that cannot be handled
        return as_error(ex)
    return response.error


def late(number: int) -> Answer:
    """Return the answer to a request whose deadline passed in the queue."""
    text = "the request's deadline passed before it could run"
    return Answer(number, error_code=Code.DEADLINE_EXCEEDED, error=text)


def cancelled(number: int) -> Answer:
    """Return the answer to a request that was cancelled in the queue."""
    return Answer(number, error_code=Code.CANCELLED, error="cancelled")
