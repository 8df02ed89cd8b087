"""Error answers: every error as ``{"error": "..."}``, with the status of `shmserve.errors`."""

import logging
from collections.abc import Callable
from typing import Any

import falcon
import msgspec
from falcon import Request, Response

from shmserve.errors import (
    GENERIC,
    ShmserveError,
    Unauthenticated,
    Unavailable,
    UnsupportedEncoding,
    of_exception,
)
from shmserve.frontends import request_ids
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.span_messages import Attribute

log = logging.getLogger("shmserve.http")

_encode = msgspec.json.Encoder().encode
_CHALLENGE = 'Bearer realm="shmserve"'


class ErrorHandlers:
    """Handlers that Falcon calls for errors. `dispatcher`: the way to the models. `infers`: returns
    True if the route of a template runs models. `forms`: pairs of a path prefix and a function. For
    paths with the prefix, the function makes the error's body from message and status."""

    def __init__(self, dispatcher: DispatchApi, infers: Callable[[str], bool]) -> None:
        self._dispatcher = dispatcher
        self._infers = infers
        self.forms: list[tuple[str, Callable[[str, int], bytes]]] = []

    def install(self, app: falcon.App[Request, Response]) -> None:
        """Register the handlers in an application."""
        app.add_error_handler(Exception, self.on_unexpected)
        app.add_error_handler(falcon.HTTPError, self.on_http_error)
        app.add_error_handler(ShmserveError, self.on_shmserve_error)

    def on_shmserve_error(
        self, req: Request, resp: Response, ex: ShmserveError, params: dict[str, Any]
    ) -> None:
        """Answer with an error of this project, whose message is written for clients."""
        request = self._answer(req, resp, ex.http_status, ex.message)
        if self._infers(req.uri_template or ""):
            trace_refused(self._dispatcher, req, ex)
        # probes ask all the time
        if not (req.path.endswith("/ready") and isinstance(ex, Unavailable)):
            request_ids.log_failure(log, f"{req.method} {req.path}", request, ex)
        if ex.retry_after_s and ex.http_status == 503:
            resp.set_header("Retry-After", str(ex.retry_after_s))
        elif isinstance(ex, Unauthenticated):
            resp.set_header("WWW-Authenticate", _CHALLENGE)
        elif isinstance(ex, UnsupportedEncoding):
            resp.set_header("Accept-Encoding", "gzip, deflate")

    def on_http_error(
        self, req: Request, resp: Response, ex: falcon.HTTPError, params: dict[str, Any]
    ) -> None:
        """Answer with an error of Falcon, such as an unknown path or method."""
        if ex.headers:
            resp.set_headers(ex.headers)
        status = falcon.http_status_to_code(ex.status)
        reason = falcon.code_to_http_status(status).partition(" ")[2]
        self._answer(req, resp, status, reason)

    def on_unexpected(
        self, req: Request, resp: Response, ex: Exception, params: dict[str, Any]
    ) -> None:
        """Answer 500 for a bug, or 502 where memory ran out: the client learns no details."""
        error = of_exception(ex)
        request = self._answer(req, resp, error.http_status, error.message)
        request_ids.log_failure(log, f"{req.method} {req.path}", request, ex)

    def _answer(self, req: Request, resp: Response, status: int, message: str) -> str:
        """Fill the response. Return the request's id, which is also in the response."""
        message = message or GENERIC
        request = request_ids.request_id(req.env.get(request_ids.IN_ENVIRON))
        resp.set_header(request_ids.HEADER, request)
        resp.status = status
        resp.content_type = "application/json"
        resp.stream = None
        for prefix, encode in self.forms:
            if req.path.startswith(prefix):
                resp.data = encode(message, status)
                return request
        resp.data = _encode({"error": message})
        return request


def trace_refused(dispatcher: DispatchApi, req: Request, error: ShmserveError) -> None:
    """Report a failed inference for tracing: it gets a span here unless an executor was asked."""
    attributes: dict[str, Attribute] = {
        "url.path": req.path,
        "http.response.status_code": error.http_status,
    }
    dispatcher.trace_refused(error, req.env.get(request_ids.TRACEPARENT_IN_ENVIRON, ""), attributes)
