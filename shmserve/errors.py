"""Errors: the one error tree, and the one table from errors to HTTP and gRPC statuses.

Every error that may reach a client derives from `ShmserveError`. The message is written for the
client: it names the field and the value at fault, and shows no path, key, address or traceback.
Details for operators go to the log.

HTTP statuses follow Triton's mapping (facts: HTTP surface, error mapping), except where a clearer
status exists (405, 411, 413, 415, 502, 504).

The server's own 503 means that nothing of the request has run. If a request had begun to run and
its result was lost, the status is 502.
"""

import errno
from enum import StrEnum
from typing import NamedTuple, Self


class Code(StrEnum):
    """Kinds of failure; the values are gRPC status names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNAVAILABLE = "UNAVAILABLE"
    ABORTED = "ABORTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"


class Statuses(NamedTuple):
    """HTTP status code and gRPC status number of a `Code`."""

    http: int
    grpc: int


STATUS_TABLE: dict[Code, Statuses] = {
    Code.INVALID_ARGUMENT: Statuses(400, 3),
    Code.NOT_FOUND: Statuses(404, 5),
    Code.ALREADY_EXISTS: Statuses(400, 6),
    Code.PERMISSION_DENIED: Statuses(403, 7),
    Code.UNAUTHENTICATED: Statuses(401, 16),
    Code.UNAVAILABLE: Statuses(503, 14),
    Code.ABORTED: Statuses(502, 10),
    Code.UNIMPLEMENTED: Statuses(501, 12),
    Code.RESOURCE_EXHAUSTED: Statuses(503, 8),
    Code.DEADLINE_EXCEEDED: Statuses(504, 4),
    Code.CANCELLED: Statuses(499, 1),
    Code.INTERNAL: Statuses(500, 13),
    Code.UNKNOWN: Statuses(500, 2),
}


class ShmserveError(Exception):
    """Base of every error with a client-visible message."""

    code: Code = Code.INTERNAL
    http: int | None = None  # a clearer HTTP status than the table's, if there is one
    retry_after_s: int = 0  # seconds until a retry may succeed: nothing has run; 0: no advice
    was_sent = False  # whether the request had been sent to an executor

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def reword(self, message: str) -> Self:
        """Replace the message. Return this error."""
        self.message, self.args = message, (message,)
        return self

    @property
    def http_status(self) -> int:
        return self.http if self.http is not None else STATUS_TABLE[self.code].http

    @property
    def grpc_status(self) -> int:
        return STATUS_TABLE[self.code].grpc


class InvalidArgument(ShmserveError):
    """The request is malformed or disagrees with the model's configuration."""

    code = Code.INVALID_ARGUMENT


class TooLarge(InvalidArgument):
    """A size limit was exceeded; the message names the limit's setting."""

    http = 413


class UnsupportedEncoding(InvalidArgument):
    """The request has a content coding that the server does not support."""

    http = 415


class NotFound(ShmserveError):
    code = Code.NOT_FOUND


class AlreadyExists(ShmserveError):
    code = Code.ALREADY_EXISTS


class PermissionDenied(ShmserveError):
    code = Code.PERMISSION_DENIED


class Unauthenticated(ShmserveError):
    """The call needs a key that is known and has not expired."""

    code = Code.UNAUTHENTICATED


class Unavailable(ShmserveError):
    """The request fails now and may succeed later: a model is not ready, a queue is full, the
    server drains."""

    code = Code.UNAVAILABLE
    retry_after_s = 1


class NotConfigured(Unavailable):
    """The configuration, or the wiring of models, rules the request out: a retry is in vain."""

    retry_after_s = 0


class NoExecutor(Unavailable):
    """No executor of the model takes requests now, and an executor is being started."""


class Unimplemented(ShmserveError):
    code = Code.UNIMPLEMENTED


class ResourceExhausted(ShmserveError):
    code = Code.RESOURCE_EXHAUSTED
    retry_after_s = 1


class DeviceMemoryExhausted(ResourceExhausted):
    """A GPU has no memory left."""


class ArenaExhausted(ResourceExhausted):
    """No slot is free and the pool's budget grants no more."""


class QueueFull(Unavailable):
    """The bounded queue in front of an executor is full."""


class WorkLost(ShmserveError):
    """A part of the request has run, or may have run, and its result is lost."""

    code = Code.ABORTED


class ExecutorLost(WorkLost):
    """The executor died while it had the request, which may have begun to run."""


class DeadlineExceeded(ShmserveError):
    code = Code.DEADLINE_EXCEEDED


class Cancelled(ShmserveError):
    code = Code.CANCELLED


class Internal(ShmserveError):
    code = Code.INTERNAL


class ModelFailure(ShmserveError):
    """An error that a model raised or returned; the model chooses `code`."""

    def __init__(self, message: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class ConfigError(ShmserveError):
    """A setting or a model configuration that cannot be used."""

    code = Code.INVALID_ARGUMENT


class ProtocolViolation(ShmserveError):
    """A peer process sent a message that its protocol forbids; its channel is closed."""


class UnreadableMessage(ProtocolViolation):
    """Bytes that do not decode to the expected message; the error's message says why."""


class StaleDescriptor(ProtocolViolation):
    """A descriptor names a slot that has a newer generation by now."""


class PeerDied(ShmserveError):
    """The process at the other end of a channel is gone."""

    code = Code.UNAVAILABLE


GENERIC = "internal server error"
# Answer of a process that is ending to new requests. Requests in progress are finished.
STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

_BY_CODE: dict[Code, type[ShmserveError]] = {
    kind.code: kind
    for kind in (
        *(InvalidArgument, NotFound, AlreadyExists, PermissionDenied, Unauthenticated),
        *(Unavailable, Unimplemented, ResourceExhausted, DeadlineExceeded, WorkLost),
    )
}


def of_exception(ex: Exception) -> ShmserveError:
    """Return an exception as an error for clients, who learn nothing of a bug."""
    if isinstance(ex, ShmserveError):
        return ex
    if isinstance(ex, MemoryError) or (isinstance(ex, OSError) and ex.errno == errno.ENOMEM):
        return WorkLost("the server ran out of memory while it had the request")
    return Internal(GENERIC)


def from_code(code: Code, message: str) -> ShmserveError:
    """Return the error that a code stands for, e.g. one that came over a channel."""
    kind = _BY_CODE.get(code)
    return ModelFailure(message, code) if kind is None else kind(message)


def of_run(code: Code, message: str) -> ShmserveError:
    """Return the error of a request that a model has run, without advice to retry."""
    error = from_code(code, message)
    error.retry_after_s = 0
    return error
