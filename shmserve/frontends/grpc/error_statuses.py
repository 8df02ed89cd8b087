"""Errors as gRPC statuses: code and text of the one table in `shmserve.errors`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import grpc

from shmserve.errors import Internal, ShmserveError
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.request_ids import log_failure, traceparent
from shmserve.protocol.control.span_messages import Attribute

_log = logging.getLogger("shmserve.grpc")

_GENERIC = "internal server error"
# Details travel percent-encoded in the trailers, for which clients have 8 KiB by default.
_MAX_DETAILS = 2000  # bytes; each may become three
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: ShmserveError) -> grpc.StatusCode:
    """The status code of an error of ours."""
    return _CODES[error.grpc_status]


def details_of(error: ShmserveError) -> str:
    """Its text for the client, cut to what every client can receive."""
    text = error.message or _GENERIC
    data = text.encode(errors="replace")
    if len(data) <= _MAX_DETAILS:
        return data.decode()
    return data[: _MAX_DETAILS - 3].decode(errors="ignore") + "..."


def as_error(ex: Exception, what: str, request: str) -> ShmserveError:
    """Whatever was raised in a request with this id as an error for the client; a defect's text
    goes to the log only."""
    log_failure(_log, what, request, ex)
    return ex if isinstance(ex, ShmserveError) else Internal(_GENERIC)


def trace_refused(
    dispatcher: DispatchApi, metadata: Iterable[tuple[str, str | bytes]], name: str, ex: Exception
) -> None:
    """An inference by an rpc with this metadata has failed: if no executor was asked for it, that
    has a span."""
    if isinstance(ex, ShmserveError):
        attributes: dict[str, Attribute] = {
            "rpc.method": name,
            "rpc.grpc.status_code": ex.grpc_status,
        }
        dispatcher.trace_refused(ex, traceparent(metadata), attributes)
