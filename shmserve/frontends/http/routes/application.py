"""HTTP application: the routes of all paths."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import falcon
from falcon.routing import CompiledRouter
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.access import Access, Action
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import route_table
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.origin_check import OriginCheck
from shmserve.frontends.http.restricted_api import Guard, HttpApp
from shmserve.frontends.http.route_table import MODEL_PATHS, App, Given, Routes
from shmserve.frontends.http.routes import api_document as openapi_routes
from shmserve.frontends.http.routes import (
    dashboard,
    model_metadata,
    repository_routes,
    settings_routes,
)
from shmserve.frontends.http.routes import regions as region_routes
from shmserve.frontends.http.routes.inference import generate_routes, json_routes
from shmserve.frontends.http.routes.inference.infer_resource import InferResource
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.oip.repository import Repository
from shmserve.frontends.oip.restricted_apis import Restricted
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.frontends.presented_keys import PresentedKeys
from shmserve.transport.trust.peer_credentials import take_as_remote

Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]


def worker_application(dispatcher: DispatchApi, settings: Settings) -> Wsgi:
    """Return the WSGI application of one HTTP worker, for all addresses of the worker."""
    take_as_remote(settings.remote_binds)
    application = create_app(dispatcher, settings)
    if not settings.metrics_bind:
        return application
    metrics = create_metrics_app(dispatcher, settings)
    ports = {bind.rpartition(":")[2] for bind in settings.metrics_bind}

    def by_port(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # On a Unix socket SERVER_PORT comes from the client's Host, so only TCP ports count. With
        # PROXY protocol REMOTE_PORT may be that of the proxy's client.
        is_unix = getattr(environ.get("gunicorn.socket"), "family", None) == socket.AF_UNIX
        tcp = environ.get("REMOTE_PORT") is not None and not is_unix
        target = metrics if tcp and environ["SERVER_PORT"] in ports else application
        return target(environ, start_response)

    return by_port


def create_app(dispatcher: DispatchApi, settings: Settings) -> HttpApp:
    """Return the application served on `http_bind`."""
    access = Access(settings, os.geteuid())
    app, routes = _empty(dispatcher, settings, access, settings.http_bind)
    regions = SharedMemory(dispatcher, settings)
    model_metadata.add_routes(routes, dispatcher, settings)
    settings_routes.add_routes(routes, dispatcher, settings)
    dashboard.add_routes(routes, dispatcher, settings, access)
    region_routes.add_routes(routes, regions, settings, access)
    repository_routes.add_routes(routes, Repository(dispatcher, settings, access), settings)
    generate_routes.add_routes(routes, dispatcher, settings)
    json_routes.add_routes(routes, dispatcher, settings)
    for path in MODEL_PATHS:
        routes.add("inference", f"{path}/infer", InferResource(dispatcher, settings, regions))
    openapi_routes.add_routes(routes, dispatcher, settings)
    route_table.add_extensions(routes, dispatcher, settings)
    routes.finish()
    return app


def create_metrics_app(dispatcher: DispatchApi, settings: Settings) -> HttpApp:
    """Return the application served on `metrics_bind`: the metrics, for callers with access on
    `http_bind` or, without `metrics_keys`, for all callers."""
    open_to_all = not settings.metrics_keys
    rules = replace(settings, keys_required_from="nobody") if open_to_all else settings
    access = Access(rules, os.geteuid())
    app, routes = _empty(dispatcher, settings, access, settings.metrics_bind)
    settings_routes.add_metrics(routes, dispatcher, settings, open_to_all)
    routes.finish()
    return app


def _empty(
    dispatcher: DispatchApi, settings: Settings, access: Access, binds: Iterable[str]
) -> tuple[App, Routes]:
    """Return an application without routes, and its table of routes."""
    keys = PresentedKeys(settings, dispatcher.count_key)
    guard = Guard(Restricted(settings.http_restricted_api), access, keys)
    router = CompiledRouter()

    def action_of(req: falcon.Request) -> Action:
        found = router.find(req.path, req)
        return guard.action_of(req, found[3] if found is not None else None)

    origins = OriginCheck(Origins(settings, binds, socket.gethostname()), action_of)
    middleware: list[Any] = [origins, guard] if guard else [origins]
    app = App(media_type="application/json", middleware=middleware, router=router)
    app.router_options.converters["given"] = Given
    errors = ErrorHandlers(dispatcher, guard.infers)
    errors.install(app)
    return app, Routes(app, guard, origins, errors)
