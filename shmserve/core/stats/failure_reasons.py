"""Failure reasons: the counter for each kind of failure. Pure."""

from __future__ import annotations

from shmserve import errors
from shmserve.core.stats.request_counters import Reason

_BY_KIND: tuple[tuple[type[BaseException], Reason], ...] = (
    (errors.QueueFull, Reason.QUEUE_FULL),
    (errors.ResourceExhausted, Reason.NO_MEMORY),
    (errors.ExecutorLost, Reason.EXECUTOR_DIED),
    (errors.WorkLost, Reason.NO_EXECUTOR),
    (errors.Unavailable, Reason.NO_EXECUTOR),
    (errors.DeadlineExceeded, Reason.DEADLINE),
    (errors.Cancelled, Reason.CANCELLED),
    (errors.ModelFailure, Reason.MODEL),
    (errors.InvalidArgument, Reason.BAD_REQUEST),
    (errors.NotFound, Reason.BAD_REQUEST),
    (errors.Unimplemented, Reason.BAD_REQUEST),
)
# Codes of failures found by the executor itself; any other error in an answer is the model's.
_BY_CODE = {
    errors.Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    errors.Code.CANCELLED: Reason.CANCELLED,
    errors.Code.RESOURCE_EXHAUSTED: Reason.NO_MEMORY,
}


def reason_of(error: BaseException) -> Reason:
    """Return the reason of a request that failed without an answer. An exception outside
    `shmserve.errors` comes from the end of a client's connection, or from a defect."""
    if isinstance(error, OSError | EOFError):
        return Reason.CANCELLED
    return next((r for kind, r in _BY_KIND if isinstance(error, kind)), Reason.INTERNAL)


def reason_of_answer(code: str) -> Reason:
    """Return the reason of a request that an executor answered with an error."""
    return _BY_CODE.get(errors.Code(code), Reason.MODEL)
