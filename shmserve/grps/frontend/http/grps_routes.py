"""GRPS over HTTP: the routes below /grps/v1/."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from falcon import Request, Response
from msgspec import UNSET, Struct, UnsetType

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, UnreadableMessage
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.openapi import BINARY, Operation
from shmserve.frontends.http.route_table import Routes
from shmserve.frontends.http.routes.dashboard import page, query_parameter
from shmserve.frontends.http.routes.inference.body_heap import RAW_COST
from shmserve.frontends.http.routes.inference.body_reader import open_body
from shmserve.frontends.http.routes.inference.infer_body import client_of
from shmserve.frontends.request_ids import TRACEPARENT_IN_ENVIRON
from shmserve.grps.frontend.exchange import options_of
from shmserve.grps.frontend.grps_service import OK, Grps
from shmserve.grps.frontend.http import custom_paths
from shmserve.grps.frontend.http.http_answers import respond_once, respond_stream
from shmserve.grps.frontend.metric_series import UNKNOWN, GrpsSeries
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol import json_reader, json_writer, model_parameters
from shmserve.grps.protocol.grps_message import GrpsMessage, failure
from shmserve.grps.protocol.model_parameters import takes_http
from shmserve.protocol.decoding import json_decoder
from shmserve.waiting import beside_if_large

BASE = "/grps/v1"
JSON = "application/json"
_TYPES = f"{JSON}, {BINARY}"
_from_json = json_decoder()


class GrpsStatusDocument(Struct):
    """Result of a request; `code` is the HTTP status of a failure."""

    code: int = 0
    msg: str = ""
    status: Literal["UNKNOWN", "SUCCESS", "FAILURE"] = "UNKNOWN"


class GrpsTensors(Struct):
    """Tensors: each has a name, a dtype, a shape and its elements, as `flat_float32` and the
    like."""

    tensors: list[dict[str, Any]] = []


class GrpsDocument(Struct):
    """protobuf's JSON of grps.protos.v1.GrpsMessage: a model, and one kind of payload."""

    status: GrpsStatusDocument | UnsetType = UNSET
    model: str | UnsetType = UNSET
    str_data: str | UnsetType = UNSET
    bin_data: str | UnsetType = UNSET
    gtensors: GrpsTensors | UnsetType = UNSET
    ndarray: Any = UNSET
    gmap: dict[str, Any] | UnsetType = UNSET


def _message(summary: str, body: Any = None, **more: Any) -> Operation:
    return Operation(summary, body, GrpsDocument, GrpsDocument, **more)


_QUICK = {
    "health/live": "Liveness of the server",
    "health/ready": "Readiness: the service is online, and required models are loaded",
    "health/online": "Set the service online",
    "health/offline": "Set the service offline",
    "metadata/server": "Served models, as YAML in str_data",
}
OPERATIONS = {
    f"{method} {BASE}/{path}": _message(summary)
    for path, summary in _QUICK.items()
    for method in ("GET", "POST")
} | {
    f"POST {BASE}/infer/predict": _message(
        "A prediction",
        GrpsDocument,
        query=("model", "streaming", "return-ndarray"),
        other_media=(BINARY,),
    ),
    f"POST {BASE}/metadata/model": _message("A model named in str_data, as YAML", GrpsDocument),
    f"GET {BASE}/monitor/metrics": Operation(
        "The metrics page", error=GrpsDocument, media="text/html; charset=utf-8"
    ),
    f"GET {BASE}/monitor/series": Operation(
        "A series of the metrics page", answer=list[Any], error=GrpsDocument, query=("name",)
    ),
}


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the routes below /grps/v1/, and the models' own paths behind all other routes."""
    routes.errors_as(f"{BASE}/", lambda message, code: json_writer.encode(failure(message, code)))
    grps = Grps(dispatcher, settings)
    predict = PredictResource(grps, settings, dispatcher)
    add = partial(routes.add, never_blocks=True)
    add("health", f"{BASE}/health/live", Quick(lambda: OK))
    add("health", f"{BASE}/health/ready", Quick(grps.ready))
    add("health", f"{BASE}/health/online", Quick(lambda: grps.set_online(True)), action="change")
    add("health", f"{BASE}/health/offline", Quick(lambda: grps.set_online(False)), action="change")
    add("inference", f"{BASE}/infer/predict", predict)
    add("metadata", f"{BASE}/metadata/server", Quick(grps.server_metadata))
    add("metadata", f"{BASE}/metadata/model", ModelMetadataResource(grps, settings))
    if settings.dashboard:
        routes.add_page(
            "statistics", f"{BASE}/monitor/metrics", page("../../../"), never_blocks=True
        )
        add("statistics", f"{BASE}/monitor/series", SeriesResource(GrpsSeries(dispatcher)))
    routes.describe(OPERATIONS)
    routes.add_behind(
        "inference", custom_paths.CustomPaths(grps, predict.serve, predict.predict).find, True
    )


class Quick:
    """GET and POST of a route that needs no payload."""

    def __init__(self, answer: Callable[[], GrpsMessage]) -> None:
        self._answer = answer

    def on_get(self, req: Request, resp: Response) -> None:
        resp.data = json_writer.encode(self._answer())

    on_post = on_get


class ModelMetadataResource:
    """POST /grps/v1/metadata/model."""

    def __init__(self, grps: Grps, settings: Settings) -> None:
        self._grps = grps
        self._settings = settings

    def on_post(self, req: Request, resp: Response) -> None:
        if _content_type(req) != JSON:
            raise _unsupported(JSON)
        text = _body_text(req, self._settings)
        try:
            document = beside_if_large(len(text), _from_json, text)
        except UnreadableMessage:
            raise InvalidArgument("the body is not valid JSON") from None
        name = document.get("str_data") if isinstance(document, dict) else None
        if name is not None and not isinstance(name, str):
            raise InvalidArgument("str_data must be a string")
        resp.data = json_writer.encode(self._grps.model_metadata(GrpsMessage(str_data=name)))


class SeriesResource:
    """GET /grps/v1/monitor/series?name=."""

    def __init__(self, series: GrpsSeries) -> None:
        self._series = series

    def on_get(self, req: Request, resp: Response) -> None:
        points = self._series.get(query_parameter(req, "name", ""))
        if points is None:
            resp.content_type = "text/plain; charset=utf-8"
        resp.data = UNKNOWN.encode() if points is None else msgspec.json.encode(points)


class PredictResource:
    """POST /grps/v1/infer/predict. `serve` answers for models that take raw HTTP requests."""

    def __init__(self, grps: Grps, settings: Settings, dispatcher: DispatchApi) -> None:
        self.serve = custom_paths.RawRequests(grps, settings, dispatcher).serve
        self._grps = grps
        self._settings = settings

    def on_post(self, req: Request, resp: Response) -> None:
        entry = self._taking_http(req)
        if entry is not None:
            self.serve(req, resp, entry)
        else:
            self.predict(req, resp)

    def _taking_http(self, req: Request) -> ModelEntry | None:
        """Return the model that the query names, or the default model, if that model takes raw
        HTTP requests."""
        if not self._grps.models.names().takes_http:
            return None
        try:
            entry = self._grps.models.ready(req.get_param("model") or "")
        except ShmserveError:
            return None  # the payload may name another model
        return entry if takes_http(entry.spec) else None

    def predict(self, req: Request, resp: Response, entry: ModelEntry | None = None) -> None:
        """Run the model that the payload or the query names; else `entry`, or the default model."""
        payload, text = _payload(req, self._settings)
        model = payload.message.model or req.get_param("model") or ""
        if model or entry is None:
            entry = self._grps.models.ready(model)
        elif entry.state is not ModelState.READY:
            raise Unavailable(f"model '{entry.spec.name}' is not ready")
        if takes_http(entry.spec):
            raise InvalidArgument(
                f"model '{entry.spec.name}' takes HTTP requests as they are: name it in the query"
            )
        streaming = custom_paths.wants_stream(entry.spec, req, text)
        as_ndarray = (req.get_param("return-ndarray") or "").lower() == "true"
        if streaming and as_ndarray:
            raise InvalidArgument("Streaming and ret ndarray are not supported at the same time.")
        options = options_of(
            *(entry.spec, model, streaming, *client_of(req.env)),
            traceparent=req.env.get(TRACEPARENT_IN_ENVIRON, ""),
        )
        exchange = self._grps.begin(payload, entry, options)
        try:
            if streaming:
                respond_stream(
                    req, resp, exchange, model_parameters.stream_type(entry.spec.parameters)
                )
            else:
                respond_once(req, resp, exchange, as_ndarray)
        except BaseException as ex:
            exchange.failed(ex)
            raise


def _payload(req: Request, settings: Settings) -> tuple[Payload, bytes]:
    """Return the payload of a request, and the JSON text of the body, empty for a binary body."""
    kind = _content_type(req)
    if kind == JSON:
        text = _body_text(req, settings)
        return Payload(beside_if_large(len(text), json_reader.parse, text)), text
    if kind != BINARY:
        raise _unsupported(_TYPES)
    if not custom_paths.has_body(req):
        raise _empty()
    reader = open_body(req.env, settings)
    if reader.remaining is not None:
        return Payload(GrpsMessage(), body=reader), b""
    data = reader.read_rest(settings.max_tensor_bytes, "max_tensor_bytes", RAW_COST)
    if not data:
        raise _empty()
    return Payload(GrpsMessage(bin_data=data)), b""


def _body_text(req: Request, settings: Settings) -> bytes:
    if not custom_paths.has_body(req):
        raise _empty()
    text = open_body(req.env, settings).read_rest(settings.max_json_bytes, "max_json_bytes")
    if not text:
        raise _empty()
    return text


def _content_type(req: Request) -> str:
    """Return the media type without parameters."""
    content_type = req.content_type
    if not content_type:
        raise InvalidArgument("No content type in headers.")
    return content_type.partition(";")[0].strip().lower()


def _unsupported(supported: str) -> InvalidArgument:
    return InvalidArgument(f"Unsupported content type. (supported: {supported})")


def _empty() -> InvalidArgument:
    return InvalidArgument("The http body is empty.")
