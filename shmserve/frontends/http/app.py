"""The HTTP application: which path leads where."""

from __future__ import annotations

import os
import socket
from typing import Any

import falcon

from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.frontends.access import Origins
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import route_table
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.origin_check import OriginCheck
from shmserve.frontends.http.restricted_api import Guard, HttpApp
from shmserve.frontends.http.route_table import MODEL_PATHS, Given, Routes
from shmserve.frontends.http.routes import dashboard, generate, metadata
from shmserve.frontends.http.routes import regions as region_routes
from shmserve.frontends.http.routes import repository as repository_routes
from shmserve.frontends.http.routes import settings as settings_routes
from shmserve.frontends.http.routes.infer import InferResource
from shmserve.frontends.oip.repository import Repository
from shmserve.frontends.oip.restricted_apis import Restricted
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.frontends.presented_keys import PresentedKeys
from shmserve.transport.peer_credentials import take_as_remote


def create_app(dispatcher: DispatchApi, settings: Settings) -> HttpApp:
    """The WSGI application of one HTTP worker."""
    take_as_remote(settings.remote_binds)
    access = Access(settings, os.geteuid())
    origins = OriginCheck(Origins(settings, settings.http_bind, socket.gethostname()))
    keys = PresentedKeys(settings, dispatcher.count_key)
    guard = Guard(Restricted(settings.http_restricted_api), access, keys)
    middleware: list[Any] = [origins, guard] if guard else [origins]
    app: HttpApp = falcon.App(media_type="application/json", middleware=middleware)
    app.router_options.converters["given"] = Given
    errors = ErrorHandlers()
    errors.install(app)
    routes = Routes(app, guard, origins, errors)
    regions = SharedMemory(dispatcher, settings)
    metadata.add_routes(routes, dispatcher, settings)
    settings_routes.add_routes(routes, dispatcher, settings)
    dashboard.add_routes(routes, dispatcher, settings)
    region_routes.add_routes(routes, regions, settings)
    repository_routes.add_routes(routes, Repository(dispatcher, settings, access), settings)
    generate.add_routes(routes, dispatcher, settings)
    for path in MODEL_PATHS:
        routes.add("inference", f"{path}/infer", InferResource(dispatcher, settings, regions))
    route_table.add_extensions(routes, dispatcher, settings)
    routes.finish()
    return app
