"""Ids by which clients and operators speak of one request, and the log's line of one that failed.

An id is the client's, or made when there is something to tell: a request that succeeds and has
brought none costs nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

from shmserve.errors import Code, ModelFailure, ShmserveError
from shmserve.log_fields import log_fields
from shmserve.observe.model_output import LineRate

HEADER = "X-Request-ID"
IN_ENVIRON = "HTTP_X_REQUEST_ID"
KEY = "x-request-id"  # of gRPC's metadata
TRACEPARENT = "traceparent"  # the same
TRACEPARENT_IN_ENVIRON = "HTTP_TRACEPARENT"

_GIVEN = re.compile(r"[!-~]{1,128}")
_LONGEST = 2000  # characters of a message in the log
_LINES_PER_S = 200  # of a process: beyond it they are counted
_rate = LineRate(_LINES_PER_S)


def request_id(given: object) -> str:
    """The client's id, if it is printable ASCII of 1 to 128 characters; else a new one."""
    if isinstance(given, str) and _GIVEN.fullmatch(given):
        return given
    return os.urandom(8).hex()


def of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The id of a call."""
    return request_id(next((value for key, value in metadata if key == KEY), None))


def brought(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[str, str], ...]:
    """The id that a call came with, as its answer has it; none, if it has brought none."""
    return tuple((KEY, request_id(value)) for key, value in metadata if key == KEY)


def traceparent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """What a call is part of, as its client has it; empty: nothing."""
    for key, value in metadata:
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""


def log_failure(log: logging.Logger, what: str, request: str, error: Exception) -> None:
    """One line, if a server's own failure is told (5xx); with the traceback of a defect."""
    told = error if isinstance(error, ShmserveError) else None
    status = 500 if told is None else told.http_status
    if status < 500 or (dropped := _rate.take()) is None:
        return
    defect = told is None or (told.code is Code.INTERNAL and not isinstance(told, ModelFailure))
    text = "unexpected error" if told is None else _printable(told.message)
    more = f" ({dropped} such lines were dropped)" if dropped else ""
    log.log(
        logging.ERROR if defect else logging.WARNING,
        "%s failed%s",
        *(_printable(what), more),
        exc_info=error if defect else None,
        extra=log_fields(status=status, request=request, error=text),
    )


def _printable(text: str) -> str:
    """On one line, whatever a client has written."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:_LONGEST]
