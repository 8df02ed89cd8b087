"""Models with a path of their own, which may take HTTP requests as they are.

The paths are looked up in the registry for each request that no route takes, so models
can come and go; other requests pay nothing for it.
"""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import parse_qsl

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.errors import ModelFailure, ProtocolViolation, TooLarge, Unavailable
from shmserve.frontends.grps.exchange import Exchange
from shmserve.frontends.grps.service import Grps
from shmserve.frontends.http.guard import Guard
from shmserve.frontends.http.infer import watch
from shmserve.frontends.http.routes.body_reader import Intake, held, open_intake
from shmserve.frontends.oip.seam import Outcome
from shmserve.grps.frontend.answers import GENERIC, refusal
from shmserve.grps.frontend.http.http_answers import BINARY, guarded, send_chunks
from shmserve.grps.protocol import custom_http as grps_http
from shmserve.grps.protocol.custom_http import HttpAnswer, HttpRequest
from shmserve.grps.protocol.model_parameters import takes_http
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger("shmserve.http")

_METHODS = ("GET", "POST")
_TEXT = "text/plain"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ \t\x21-\x7e\x80-\xff]*")
# The server's own business
_FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive", "date", "server"}


def has_body(req: falcon.Request) -> bool:
    """Whether a request has one, as far as its head tells."""
    return "HTTP_TRANSFER_ENCODING" in req.env or req.env.get("CONTENT_LENGTH", "") not in ("", "0")


# ------------------------------------------------------------- control of streaming


def stream_type(spec: ModelSpec) -> str:
    """The content type of a stream."""
    return spec.parameters.get("grps_streaming_ctrl_content_type", BINARY)


def wants_stream(spec: ModelSpec, req: falcon.Request, body: bytes) -> bool:
    """Whether a request asks for a stream, in the way the model is configured for."""
    mode = spec.parameters.get("grps_streaming_ctrl_mode", "query_param")
    key = spec.parameters.get("grps_streaming_ctrl_key", "streaming")
    if mode == "query_param":
        return (req.get_param(key) or "").lower() == "true"
    if mode == "header_param":
        return (req.get_header(key) or "").lower() == "true"
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return bytes(document.get(key, b"")) == b"true"


def reads_body(spec: ModelSpec) -> bool:
    """Whether only the body tells if a stream is wanted."""
    return spec.parameters.get("grps_streaming_ctrl_mode") == "body_param"


# ------------------------------------------------------------------- models' paths


class CustomPaths:
    """Serves what no route took. `predict` answers plain GRPS requests."""

    def __init__(self, grps: Grps, settings: Settings, guard: Guard, predict: Any) -> None:
        self._grps = grps
        self._guard = guard
        self._settings = settings
        self._predict = predict

    def sink(self, req: falcon.Request, resp: falcon.Response, **_: str) -> None:
        """The model of a path, or 404."""
        try:
            entry = self._grps.models.names().paths.get(req.path)
        except Unavailable:
            entry = None
        if entry is None:
            raise falcon.HTTPRouteNotFound
        self._guard.check_inference(req)
        if req.method not in _METHODS:
            raise falcon.HTTPMethodNotAllowed(list(_METHODS))
        if takes_http(entry.spec):
            serve(self._grps, self._settings, entry, req, resp)
        else:
            self._predict(req, resp, entry)


def serve(
    grps: Grps,
    settings: Settings,
    entry: ModelEntry,
    req: falcon.Request,
    resp: falcon.Response,
) -> None:
    """Let the model answer the request as it is. Failures are short plain text."""
    try:
        if entry.state is not ModelState.READY:
            raise Unavailable(f"model '{entry.spec.name}' is not ready")
        _serve(grps, settings, entry, req, resp)
    except Exception as ex:
        told = refusal(ex, req.path).status
        assert told is not None
        resp.status = told.code
        resp.content_type = _TEXT
        resp.stream = None
        resp.text = told.msg


def _serve(
    grps: Grps,
    settings: Settings,
    entry: ModelEntry,
    req: falcon.Request,
    resp: falcon.Response,
) -> None:
    intake = _open(req, settings)
    body = b""
    if reads_body(entry.spec):
        body = intake.read_rest(settings.max_json_bytes)
        intake = held(body)
    if (intake.remaining or 0) > settings.max_tensor_bytes:
        raise TooLarge(
            f"the body has {intake.remaining} bytes, at most {settings.max_tensor_bytes} are"
            " allowed (setting max_tensor_bytes)"
        )
    streaming = wants_stream(entry.spec, req, body)
    exchange = grps.begin_http(entry, _head(req), intake, streaming)
    try:
        if streaming:
            _answer_stream(req, resp, exchange)
        else:
            _answer_once(req, resp, exchange)
    except BaseException as ex:
        exchange.failed(ex)
        raise


def _open(req: falcon.Request, settings: Settings) -> Intake:
    if not has_body(req):
        return held(b"")
    environ = {k: v for k, v in req.env.items() if k != "HTTP_CONTENT_ENCODING"}
    intake = open_intake(environ, settings)  # as it is: still compressed, if it was
    if intake.remaining is None:
        return held(intake.read_rest(settings.max_tensor_bytes))
    return intake


def _head(req: falcon.Request) -> HttpRequest:
    query = parse_qsl(req.query_string, keep_blank_values=True)
    headers = [(name.title(), value) for name, value in req.headers.items()]
    return HttpRequest(req.method, req.path, tuple(query), tuple(headers), req.remote_addr or "")


def _answer_once(req: falcon.Request, resp: falcon.Response, exchange: Exchange) -> None:
    def make(outcome: Outcome, lasting: bool) -> bytes:
        _apply(resp, outcome)
        return _body(outcome)

    resp.data = exchange.once(make, watch(req.env))
    exchange.close()


def _answer_stream(req: falcon.Request, resp: falcon.Response, exchange: Exchange) -> None:
    outcomes = exchange.outcomes(watch(req.env))
    first = next(outcomes, None)
    resp.content_type = stream_type(exchange.entry.spec)
    data = b""
    if first is not None:
        _apply(resp, first)
        data = _body(first)
    rest = guarded((_body(outcome) for outcome in outcomes), req.path, _failure_text)
    send_chunks(resp, exchange, data, rest)


def _failure_text(ex: Exception, what: str) -> bytes:
    told = refusal(ex, what).status
    return (told.msg if told is not None else GENERIC).encode()


def _body(outcome: Outcome) -> bytes:
    return next((bytes(o.view) for o in outcome.outputs if o.name == grps_http.BODY), b"")


def _apply(resp: falcon.Response, outcome: Outcome) -> None:
    """Status and header fields that the model gave.

    Raises:
        ModelFailure: they cannot be sent.
    """
    view = next((o.view for o in outcome.outputs if o.name == grps_http.HEAD), None)
    try:
        head = grps_http.decode_answer(view) if view is not None and len(view) else HttpAnswer()
    except ProtocolViolation as ex:
        raise ModelFailure("the model's answer has no readable head") from ex
    if not 200 <= head.status <= 599:
        raise ModelFailure(f"the model answered with status {head.status}")
    resp.status = head.status
    for name, value in head.headers:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise ModelFailure("the model's answer has a malformed header field")
        if name.lower() == "content-type":
            resp.content_type = value
        elif name.lower() not in _FRAMING:
            resp.append_header(name, value)
