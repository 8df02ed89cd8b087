"""GRPS over HTTP: /grps/v1/."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.frontends.grps.service import OK, Grps
from shmserve.frontends.http.guard import Guard
from shmserve.frontends.http.routes.body_reader import open_intake
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.grps.frontend.http import custom_paths as grps_custom
from shmserve.grps.frontend.http.custom_paths import (
    CustomPaths,
    has_body,
    stream_type,
    wants_stream,
)
from shmserve.grps.frontend.http.http_answers import BINARY, respond_once, respond_stream
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol import json_reader as grps_json
from shmserve.grps.protocol import json_writer as grps_json_out
from shmserve.grps.protocol.message import GrpsMessage
from shmserve.grps.protocol.model_parameters import takes_http

BASE = "/grps/v1"
JSON = "application/json"
_TYPES = f"{JSON}, {BINARY}"


def add_routes(
    app: falcon.App[falcon.Request, falcon.Response],
    dispatcher: Dispatcher,
    settings: Settings,
    guard: Guard,
) -> None:
    """Everything below /grps/v1/, and the models' own paths behind all others."""
    grps = Grps(dispatcher, settings)
    predict = PredictResource(grps, settings)
    app.add_route(f"{BASE}/health/live", Quick(lambda: OK))
    app.add_route(f"{BASE}/health/ready", Quick(grps.ready))
    app.add_route(f"{BASE}/health/online", Quick(lambda: grps.set_online(True)))
    app.add_route(f"{BASE}/health/offline", Quick(lambda: grps.set_online(False)))
    app.add_route(f"{BASE}/infer/predict", predict)
    app.add_route(f"{BASE}/metadata/server", Quick(grps.server_metadata))
    app.add_route(f"{BASE}/metadata/model", ModelMetadataResource(grps, settings))
    app.add_sink(CustomPaths(grps, settings, guard, predict.predict).sink, r"/")


class Quick:
    """GET and POST of what needs no payload."""

    def __init__(self, answer: Callable[[], GrpsMessage]) -> None:
        self._answer = answer

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = grps_json_out.encode(self._answer())

    on_post = on_get


class ModelMetadataResource:
    """POST /grps/v1/metadata/model."""

    def __init__(self, grps: Grps, settings: Settings) -> None:
        self._grps = grps
        self._settings = settings

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        if _content_type(req) != JSON:
            raise _unsupported(JSON)
        text = _body_text(req, self._settings)
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InvalidArgument("the body is not valid JSON") from None
        name = document.get("str_data") if isinstance(document, dict) else None
        if name is not None and not isinstance(name, str):
            raise InvalidArgument("str_data must be a string")
        resp.data = grps_json_out.encode(self._grps.model_metadata(GrpsMessage(str_data=name)))


class PredictResource:
    """POST /grps/v1/infer/predict."""

    def __init__(self, grps: Grps, settings: Settings) -> None:
        self._grps = grps
        self._settings = settings

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        entry = self._taking_http(req)
        if entry is not None:
            grps_custom.serve(self._grps, self._settings, entry, req, resp)
        else:
            self.predict(req, resp)

    def _taking_http(self, req: falcon.Request) -> ModelEntry | None:
        """The model that the query names, or the default one, if it takes requests as they are."""
        if not self._grps.models.names().takes_http:
            return None
        try:
            entry = self._grps.entry(req.get_param("model") or "")
        except ShmserveError:
            return None  # the payload may name another
        return entry if takes_http(entry.spec) else None

    def predict(
        self, req: falcon.Request, resp: falcon.Response, entry: ModelEntry | None = None
    ) -> None:
        """Run the model that the payload names, or the query; else `entry`, or the default."""
        started = monotonic_ns()
        payload, text = _payload(req, self._settings)
        model = payload.message.model or req.get_param("model") or ""
        if model or entry is None:
            entry = self._grps.entry(model)
        elif entry.state is not ModelState.READY:
            raise Unavailable(f"model '{entry.spec.name}' is not ready")
        if takes_http(entry.spec):
            raise InvalidArgument(
                f"model '{entry.spec.name}' takes HTTP requests as they are: name it in the query"
            )
        streaming = wants_stream(entry.spec, req, text)
        as_ndarray = (req.get_param("return-ndarray") or "").lower() == "true"
        if streaming and as_ndarray:
            raise InvalidArgument("Streaming and ret ndarray are not supported at the same time.")
        exchange = self._grps.begin(payload, entry, model, streaming)
        try:
            exchange.call.receipt.receive_ns = monotonic_ns() - started
            if streaming:
                respond_stream(req, resp, exchange, stream_type(entry.spec))
            else:
                respond_once(req, resp, exchange, as_ndarray)
        except BaseException as ex:
            exchange.failed(ex)
            raise


def _payload(req: falcon.Request, settings: Settings) -> tuple[Payload, bytes]:
    """What the request holds, and its JSON text."""
    kind = _content_type(req)
    if kind == JSON:
        text = _body_text(req, settings)
        return Payload(grps_json.parse(text, settings)), text
    if kind != BINARY:
        raise _unsupported(_TYPES)
    if not has_body(req):
        raise _empty()
    intake = open_intake(req.env, settings)
    if intake.remaining is not None:
        return Payload(GrpsMessage(), body=intake), b""
    data = intake.read_rest(settings.max_tensor_bytes)
    if not data:
        raise _empty()
    return Payload(GrpsMessage(bin_data=data)), b""


def _body_text(req: falcon.Request, settings: Settings) -> bytes:
    if not has_body(req):
        raise _empty()
    text = open_intake(req.env, settings).read_rest(settings.max_json_bytes)
    if not text:
        raise _empty()
    return text


def _content_type(req: falcon.Request) -> str:
    """The media type without its parameters."""
    given = req.content_type
    if not given:
        raise InvalidArgument("No content type in headers.")
    return given.partition(";")[0].strip().lower()


def _unsupported(supported: str) -> InvalidArgument:
    return InvalidArgument(f"Unsupported content type. (supported: {supported})")


def _empty() -> InvalidArgument:
    return InvalidArgument("The http body is empty.")
