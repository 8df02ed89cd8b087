"""Every error as ``{"error": "..."}`` or a GRPS message, with the status of `errors`' table."""

from __future__ import annotations

import logging
from typing import Any

import falcon
import msgspec

from shmserve.errors import (
    ArenaExhausted,
    Code,
    ModelFailure,
    QueueFull,
    ShmserveError,
    UnsupportedEncoding,
)
from shmserve.grps.protocol import json_writer as grps_json_out
from shmserve.grps.protocol.message import failure

log = logging.getLogger("shmserve.http")

_encode = msgspec.json.Encoder().encode
_RETRY_AFTER_S = "1"
_GENERIC = "internal server error"
_GRPS = "/grps/v1/"  # whose clients look for errors in another form


def _answer(req: falcon.Request, resp: falcon.Response, status: int, message: str) -> None:
    message = message or _GENERIC
    resp.status = status
    resp.content_type = "application/json"
    resp.stream = None
    if req.path.startswith(_GRPS):
        resp.data = grps_json_out.encode(failure(message, status))
    else:
        resp.data = _encode({"error": message})


def on_shmserve_error(
    req: falcon.Request, resp: falcon.Response, ex: ShmserveError, params: dict[str, Any]
) -> None:
    """An error of ours: its message was written for the client."""
    _answer(req, resp, ex.http_status, ex.message)
    if ex.code is Code.INTERNAL and not isinstance(ex, ModelFailure):
        log.error("%s %s failed", req.method, req.path, exc_info=ex)
    if isinstance(ex, QueueFull | ArenaExhausted):
        resp.set_header("Retry-After", _RETRY_AFTER_S)
    elif isinstance(ex, UnsupportedEncoding):
        resp.set_header("Accept-Encoding", "gzip, deflate")


def on_http_error(
    req: falcon.Request, resp: falcon.Response, ex: falcon.HTTPError, params: dict[str, Any]
) -> None:
    """An error of Falcon's: no such path, no such method."""
    if ex.headers:
        resp.set_headers(ex.headers)
    status = falcon.http_status_to_code(ex.status)
    reason = falcon.code_to_http_status(status).partition(" ")[2]
    _answer(req, resp, status, reason)


def on_unexpected(
    req: falcon.Request, resp: falcon.Response, ex: Exception, params: dict[str, Any]
) -> None:
    """A defect: the client learns that there is one, the log what it is."""
    log.error("unexpected error in %s %s", req.method, req.path, exc_info=ex)
    _answer(req, resp, 500, _GENERIC)
