"""gRPC statuses of errors: code and text from the table in `shmserve.errors`."""

import logging
from collections.abc import Iterable

import grpc

from shmserve.errors import GENERIC, ShmserveError, of_exception
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.request_ids import log_failure, traceparent
from shmserve.protocol.control.span_messages import Attribute

_log = logging.getLogger("shmserve.grpc")

# Details travel percent-encoded in the trailers, for which clients allow 8 KiB by default.
_MAX_DETAILS = 2000  # bytes; percent-encoding may triple each byte
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: ShmserveError) -> grpc.StatusCode:
    """Return the status code of a project error."""
    return _CODES[error.grpc_status]


def details_of(error: ShmserveError) -> str:
    """Return an error's text for the client, cut to a length that every client can receive."""
    text = error.message or GENERIC
    data = text.encode(errors="replace")
    if len(data) <= _MAX_DETAILS:
        return data.decode()
    return data[: _MAX_DETAILS - 3].decode(errors="ignore") + "..."


def as_error(ex: Exception, what: str, request: str) -> ShmserveError:
    """Turn an exception of the request with this id into an error for the client, and log the
    failure. The text of a bug goes only to the log."""
    log_failure(_log, what, request, ex)
    return of_exception(ex)


def trace_refused(
    dispatcher: DispatchApi, metadata: Iterable[tuple[str, str | bytes]], name: str, ex: Exception
) -> None:
    """Record a span for a failed inference by an rpc with the metadata if no executor was asked."""
    if isinstance(ex, ShmserveError):
        attributes: dict[str, Attribute] = {
            "rpc.method": name,
            "rpc.grpc.status_code": ex.grpc_status,
        }
        dispatcher.trace_refused(ex, traceparent(metadata), attributes)
