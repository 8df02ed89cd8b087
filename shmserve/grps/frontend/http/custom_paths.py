"""Models with an HTTP path of their own, which may take raw HTTP requests.

A path is looked up in the registry for each request that no route takes, so models can come and go
without cost for other requests.

The paths come after all routes of the application (`Routes.add_behind`).
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qsl

import falcon
import msgspec
from falcon import Request, Response

from shmserve import errors
from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.dispatch.outcome import Outcome
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.error_handlers import trace_refused
from shmserve.frontends.http.route_table import Responder
from shmserve.frontends.http.routes.inference.body_heap import RAW_COST
from shmserve.frontends.http.routes.inference.body_reader import BodyReader, held, open_body
from shmserve.frontends.http.routes.inference.infer_body import client_of
from shmserve.frontends.http.server.header_fields import underscored
from shmserve.frontends.http.server.response import send_chunks
from shmserve.frontends.request_ids import TRACEPARENT_IN_ENVIRON
from shmserve.grps.frontend.answers import refusal
from shmserve.grps.frontend.exchange import Exchange, options_of
from shmserve.grps.frontend.grps_service import Grps
from shmserve.grps.frontend.http.http_answers import guarded
from shmserve.grps.protocol import custom_http, model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer, RequestHead
from shmserve.grps.protocol.model_parameters import takes_http
from shmserve.protocol.decoding import json_decoder
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger("shmserve.http")

_members = json_decoder(dict[str, msgspec.Raw])
_METHODS = ("GET", "POST")
Respond = Callable[[Request, Response, ModelEntry], None]
_TEXT = "text/plain"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ \t\x21-\x7e\x80-\xff]*")
# header fields that the server sets
_FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive", "date", "server"}


def has_body(req: Request) -> bool:
    """Return True if the head of a request announces a body."""
    return "HTTP_TRANSFER_ENCODING" in req.env or req.env.get("CONTENT_LENGTH", "") not in ("", "0")


# ------------------------------------------------------------- control of streaming


def wants_stream(spec: ModelSpec, req: Request, body: bytes) -> bool:
    """Return True if a request asks for a stream in the way of the model's configuration."""
    mode = spec.parameters.get("grps_streaming_ctrl_mode", "query_param")
    key = spec.parameters.get("grps_streaming_ctrl_key", "streaming")
    if mode == "query_param":
        return (req.get_param(key) or "").lower() == "true"
    if mode == "header_param":
        value = underscored(req.env).get(key.lower()) or req.get_header(key) or ""
        return value.lower() == "true"
    try:
        document = _members(body)
    except errors.UnreadableMessage:
        return False
    return bytes(document.get(key, b"")) == b"true"


# ------------------------------------------------------------------- models' paths


class RawRequests:
    """Passes raw HTTP requests to models. Failures are answered by short plain text."""

    def __init__(self, grps: Grps, settings: Settings, dispatcher: DispatchApi) -> None:
        self._grps = grps
        self._settings = settings
        self._dispatcher = dispatcher

    def serve(self, req: Request, resp: Response, entry: ModelEntry) -> None:
        try:
            if entry.state is not ModelState.READY:
                raise errors.Unavailable(f"model '{entry.spec.name}' is not ready")
            self._serve(req, resp, entry)
        except Exception as ex:
            if isinstance(ex, errors.ShmserveError):
                trace_refused(self._dispatcher, req, ex)
            status = refusal(ex, req.path).status
            assert status is not None
            resp.status = status.code
            resp.content_type = _TEXT
            resp.stream = None
            resp.text = status.msg

    def _serve(self, req: Request, resp: Response, entry: ModelEntry) -> None:
        settings = self._settings
        reader = _open(req, settings)
        body = b""
        # In this mode, the body says whether the client wants a stream.
        if entry.spec.parameters.get("grps_streaming_ctrl_mode") == "body_param":
            body = reader.read_rest(settings.max_json_bytes, "max_json_bytes", RAW_COST)
            reader = held(body)
        if (reader.remaining or 0) > settings.max_tensor_bytes:
            raise errors.TooLarge(
                f"the body has {reader.remaining} bytes, at most {settings.max_tensor_bytes} are"
                " allowed (setting max_tensor_bytes)"
            )
        streaming = wants_stream(entry.spec, req, body)
        options = options_of(
            *(entry.spec, "", streaming, *client_of(req.env)),
            traceparent=req.env.get(TRACEPARENT_IN_ENVIRON, ""),
        )
        exchange = self._grps.begin_http(entry, _head(req), reader, options)
        try:
            if streaming:
                _answer_stream(req, resp, exchange)
            else:
                resp.data = exchange.once(lambda outcome, _: _apply(resp, outcome))
                exchange.close()
        except BaseException as ex:
            exchange.failed(ex)
            raise


class CustomPaths:
    """Responders for requests that no route takes. `serve`: answers raw HTTP requests. `predict`:
    answers plain GRPS requests."""

    def __init__(self, grps: Grps, serve: Respond, predict: Respond) -> None:
        self._grps = grps
        self._serve = serve
        self._predict = predict

    def find(self, req: Request) -> Responder | None:
        """Return the responder for the model with this path, or None if no model has this path."""
        try:
            entry = self._grps.models.names().paths.get(req.path)
        except errors.Unavailable:
            return None
        return None if entry is None else partial(self._respond, entry)

    def _respond(self, entry: ModelEntry, req: Request, resp: Response) -> None:
        if req.method not in _METHODS:
            raise falcon.HTTPMethodNotAllowed(list(_METHODS))
        respond = self._serve if takes_http(entry.spec) else self._predict
        respond(req, resp, entry)


def _open(req: Request, settings: Settings) -> BodyReader:
    if not has_body(req):
        return held(b"")
    environ = {k: v for k, v in req.env.items() if k != "HTTP_CONTENT_ENCODING"}
    reader = open_body(environ, settings)  # a compressed body stays compressed
    if reader.remaining is None:
        return held(reader.read_rest(settings.max_tensor_bytes, "max_tensor_bytes", RAW_COST))
    return reader


def _head(req: Request) -> RequestHead:
    query = parse_qsl(req.query_string, keep_blank_values=True)
    fields = [*req.headers.items(), *underscored(req.env).items()]
    headers = [(name.title(), value) for name, value in fields]
    return RequestHead(req.method, req.path, tuple(query), tuple(headers), req.remote_addr or "")


def _answer_stream(req: Request, resp: Response, exchange: Exchange) -> None:
    outcomes = exchange.outcomes()
    first = next(outcomes, None)
    resp.content_type = model_parameters.stream_type(exchange.entry.spec.parameters)
    data = b"" if first is None else _apply(resp, first)
    rest = guarded((_body(outcome) for outcome in outcomes), req.path, _failure_text)
    send_chunks(resp, data, rest, exchange.close)


def _failure_text(ex: Exception, what: str) -> bytes:
    status = refusal(ex, what).status
    return (status.msg if status is not None else errors.GENERIC).encode()


def _body(outcome: Outcome) -> bytes:
    return next((bytes(o.view) for o in outcome.outputs if o.name == custom_http.BODY), b"")


def _apply(resp: Response, outcome: Outcome) -> bytes:
    """Set the status and header fields that the model gave. Return the body. Raise ModelFailure if
    status or header fields cannot be sent."""
    view = next((o.view for o in outcome.outputs if o.name == custom_http.HEAD), None)
    try:
        head = custom_http.decode_answer(view) if view is not None and len(view) else HttpAnswer()
    except errors.ProtocolViolation as ex:
        raise errors.ModelFailure("the model's answer has no readable head") from ex
    if not 200 <= head.status <= 599:
        raise errors.ModelFailure(f"the model answered with status {head.status}")
    resp.status = head.status
    for name, value in head.headers:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise errors.ModelFailure("the model's answer has a malformed header field")
        if name.lower() == "content-type":
            resp.content_type = value
        elif name.lower() not in _FRAMING:
            resp.append_header(name, value)
    return _body(outcome)
