"""Statistics, trace and log settings, and metrics over HTTP."""

from __future__ import annotations

from typing import Any

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.routes.body_reader import open_intake
from shmserve.frontends.http.routes.metrics import CONTENT_TYPE, Metrics
from shmserve.frontends.http.routes.paths import checked_version
from shmserve.frontends.oip.log_and_trace import ServerSettings
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.frontends.oip.statistics import Statistics
from shmserve.protocol.oip import strict_parser as oip_strict

_encode = msgspec.json.Encoder().encode
_MAX_BODY = 64 * 1024


class StatisticsResource:
    """GET /v2/models/stats and /v2/models/{m}[/versions/{v}]/stats."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def on_get(
        self, req: falcon.Request, resp: falcon.Response, name: str = "", version: str = ""
    ) -> None:
        models = self._statistics.models(name, checked_version(version) if version else "")
        resp.data = _encode({"model_stats": models})

    on_head = on_get


class TraceResource:
    """GET and POST /v2[/models/{m}]/trace/setting."""

    def __init__(self, server: ServerSettings, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str = "") -> None:
        resp.data = _encode(self._server.trace(name))

    on_head = on_get

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str = "") -> None:
        resp.data = _encode(self._server.trace(name, _document(req, self._settings)))


class LoggingResource:
    """GET and POST /v2/logging."""

    def __init__(self, server: ServerSettings, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _encode(self._server.logging())

    on_head = on_get

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _encode(self._server.logging(_document(req, self._settings)))


class MetricsResource:
    """GET /metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = self._metrics.text()
        resp.content_type = CONTENT_TYPE

    on_head = on_get


def _document(req: falcon.Request, settings: Settings) -> dict[str, Any]:
    body = open_intake(req.env, settings).read_rest(_MAX_BODY)
    document = oip_strict.loads(body, settings) if body else {}
    if not isinstance(document, dict):
        raise InvalidArgument("the settings must be a JSON object")
    return document


def add_routes(
    app: falcon.App[falcon.Request, falcon.Response], dispatcher: Dispatcher, settings: Settings
) -> None:
    """All routes of this module."""
    statistics = StatisticsResource(Statistics(dispatcher))
    server = ServerSettings(dispatcher, settings)
    trace = TraceResource(server, settings)
    app.add_route("/v2/models/stats", statistics)
    app.add_route("/v2/models/{name}/stats", statistics)
    app.add_route("/v2/models/{name}/versions/{version}/stats", statistics)
    app.add_route("/v2/trace/setting", trace)
    app.add_route("/v2/models/{name}/trace/setting", trace)
    app.add_route("/v2/logging", LoggingResource(server, settings))
    if settings.metrics:
        app.add_route("/metrics", MetricsResource(Metrics(dispatcher, settings)))
