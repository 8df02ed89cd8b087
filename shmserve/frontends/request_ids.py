"""Request ids, by which clients and operators refer to one request, and the log line of a failure.

An id comes from the client, or is made when a failure is reported. So a successful request without
an id costs nothing.
"""

import logging
import os
import re
from collections.abc import Iterable

from shmserve.errors import GENERIC, Code, ModelFailure, of_exception
from shmserve.log_fields import log_fields

HEADER = "X-Request-ID"
IN_ENVIRON = "HTTP_X_REQUEST_ID"
KEY = "x-request-id"  # in the metadata of gRPC calls
TRACEPARENT = "traceparent"  # in the metadata of gRPC calls
TRACEPARENT_IN_ENVIRON = "HTTP_TRACEPARENT"

_GIVEN = re.compile(r"[!-~]{1,128}")
_LONGEST = 2000  # characters of a message in the log


def request_id(given: object) -> str:
    """Return the client's id, if printable ASCII of 1 to 128 characters; else a new id."""
    if isinstance(given, str) and _GIVEN.fullmatch(given):
        return given
    return os.urandom(8).hex()


def of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the id of a call, or a new id if the call brought none."""
    return request_id(next((value for key, value in metadata if key == KEY), None))


def brought(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[str, str], ...]:
    """Return the ids in a call's metadata as metadata for the answer; empty without an id."""
    return tuple((KEY, request_id(value)) for key, value in metadata if key == KEY)


def traceparent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the client's trace context from a call's metadata, empty if there is none."""
    for key, value in metadata:
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""


def log_failure(log: logging.Logger, what: str, request: str, error: Exception) -> None:
    """Log one line if the failure is the server's own (status 5xx), with the traceback if the
    cause is a bug."""
    shown = of_exception(error)
    status = shown.http_status
    if status < 500:
        return
    defect = shown.code is Code.INTERNAL and not isinstance(shown, ModelFailure)
    text = "unexpected error" if shown.message == GENERIC else _printable(shown.message)
    log.log(
        logging.ERROR if defect else logging.WARNING,
        "%s failed",
        _printable(what),
        exc_info=error if defect else None,
        extra=log_fields(status=status, request=request, error=text),
    )


def _printable(text: str) -> str:
    """Return text from a client as one printable line of bounded length."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:_LONGEST]
