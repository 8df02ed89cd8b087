"""Statistics, trace and log settings, and metrics over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from falcon import Request, Response

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.route_table import MODEL_PATHS, Get, Routes, checked_version
from shmserve.frontends.http.routes.inference.body_reader import small_body
from shmserve.frontends.http.routes.scrape.prometheus_text import CONTENT_TYPE, Metrics
from shmserve.frontends.oip.log_and_trace import ServerSettings
from shmserve.frontends.oip.statistics import Statistics
from shmserve.protocol.oip import strict_parser

_encode = msgspec.json.Encoder().encode


class _Setting:
    """Responders for GET and POST of settings. `answer` gets the path's variables and changes."""

    def __init__(self, answer: Callable[..., Any], settings: Settings) -> None:
        self._answer = answer
        self._settings = settings

    def on_get(self, req: Request, resp: Response, **path: str) -> None:
        resp.data = _encode(self._answer(*path.values()))

    on_head = on_get

    def on_post(self, req: Request, resp: Response, **path: str) -> None:
        body = small_body(req.env, self._settings)
        update = strict_parser.loads(body) if body else {}
        if not isinstance(update, dict):
            raise InvalidArgument("the settings must be a JSON object")
        resp.data = _encode(self._answer(*path.values(), update=update))


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add all routes of this module."""
    statistics = Statistics(dispatcher)
    server = ServerSettings(dispatcher, settings)

    def stats(req: Request, resp: Response, name: str = "", version: str = "") -> None:
        resp.data = _encode({"model_stats": statistics.models(name, checked_version(version))})

    routes.add("statistics", "/v2/models/stats", Get(stats))
    for path in MODEL_PATHS:
        routes.add("statistics", f"{path}/stats", Get(stats))
    trace = _Setting(server.trace, settings)
    routes.add("trace", "/v2/trace/setting", trace)
    routes.add("trace", "/v2/models/{name}/trace/setting", trace)
    routes.add("logging", "/v2/logging", _Setting(server.logging, settings))
    if settings.metrics and not settings.metrics_bind:
        add_metrics(routes, dispatcher, settings)


def add_metrics(
    routes: Routes, dispatcher: DispatchApi, settings: Settings, hide_keys: bool = False
) -> None:
    """Add GET /metrics. `hide_keys`: hide names of keys from callers without a key."""
    metrics = Metrics(dispatcher, settings)

    def scrape(req: Request, resp: Response) -> None:
        resp.data = metrics.text(hide_keys and "use" not in caller_of(req.env).scopes)
        resp.content_type = CONTENT_TYPE

    routes.add("statistics", "/metrics", Get(scrape))
