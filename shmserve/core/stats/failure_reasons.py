"""Failure reasons: the counter for each kind of failure. Pure."""

from __future__ import annotations

from shmserve.core.stats.request_counters import Reason
from shmserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    ExecutorLost,
    InvalidArgument,
    ModelFailure,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    WorkLost,
)

_BY_KIND: tuple[tuple[type[BaseException], Reason], ...] = (
    (QueueFull, Reason.QUEUE_FULL),
    (ResourceExhausted, Reason.NO_MEMORY),
    (ExecutorLost, Reason.EXECUTOR_DIED),
    (WorkLost, Reason.NO_EXECUTOR),
    (Unavailable, Reason.NO_EXECUTOR),
    (DeadlineExceeded, Reason.DEADLINE),
    (Cancelled, Reason.CANCELLED),
    (ModelFailure, Reason.MODEL),
    (InvalidArgument, Reason.BAD_REQUEST),
    (NotFound, Reason.BAD_REQUEST),
    (Unimplemented, Reason.BAD_REQUEST),
)
# Codes of failures found by the executor itself; any other error in an answer is the model's.
_BY_CODE = {
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    Code.CANCELLED: Reason.CANCELLED,
    Code.RESOURCE_EXHAUSTED: Reason.NO_MEMORY,
}


def reason_of(error: BaseException) -> Reason:
    """Return the reason of a request that failed without an answer. An exception outside
    `shmserve.errors` comes from the end of a client's connection, or from a defect."""
    if isinstance(error, OSError | EOFError):
        return Reason.CANCELLED
    return next((r for kind, r in _BY_KIND if isinstance(error, kind)), Reason.INTERNAL)


def reason_of_answer(code: str) -> Reason:
    """Return the reason of a request that an executor answered with an error."""
    return _BY_CODE.get(Code(code), Reason.MODEL)
