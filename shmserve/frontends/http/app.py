"""The HTTP application: which path leads where."""

from __future__ import annotations

import falcon

from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.frontends.http import failures, observing
from shmserve.frontends.http.generate import GenerateResource, GenerateStreamResource
from shmserve.frontends.http.guard import Guard
from shmserve.frontends.http.infer import InferResource
from shmserve.frontends.http.resources import (
    LiveResource,
    ModelConfigResource,
    ModelReadyResource,
    ModelResource,
    ReadyResource,
    ServerResource,
)
from shmserve.frontends.http.routes import dashboard
from shmserve.frontends.http.routes import regions as region_routes
from shmserve.frontends.http.routes import repository as repository_routes
from shmserve.frontends.oip.repository import Repository
from shmserve.frontends.oip.restricted_apis import Restricted
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.frontends.oip.shared_memory import Regions
from shmserve.grps.frontend.http import grps_routes as grps

# A model's paths stand once without and once with a version
_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")


def create_app(
    dispatcher: Dispatcher, settings: Settings
) -> falcon.App[falcon.Request, falcon.Response]:
    """The WSGI application of one HTTP worker."""
    restricted = Restricted(settings.http_restricted_api)
    guard = Guard(restricted)
    app: falcon.App[falcon.Request, falcon.Response] = falcon.App(
        media_type="application/json", middleware=[guard] if restricted else None
    )
    app.add_error_handler(Exception, failures.on_unexpected)
    app.add_error_handler(falcon.HTTPError, failures.on_http_error)
    app.add_error_handler(ShmserveError, failures.on_shmserve_error)
    app.add_route("/v2", ServerResource(settings))
    app.add_route("/v2/health/live", LiveResource())
    app.add_route("/v2/health/ready", ReadyResource(dispatcher))
    regions = Regions(dispatcher, settings)
    observing.add_routes(app, dispatcher, settings)
    dashboard.add_routes(app, dispatcher, settings)
    region_routes.add_routes(app, regions, settings)
    repository_routes.add_routes(app, Repository(dispatcher, settings), settings)
    for path in _MODEL:
        app.add_route(path, ModelResource(dispatcher))
        app.add_route(f"{path}/ready", ModelReadyResource(dispatcher))
        app.add_route(f"{path}/config", ModelConfigResource(dispatcher))
        app.add_route(f"{path}/infer", InferResource(dispatcher, settings, regions))
        app.add_route(f"{path}/generate", GenerateResource(dispatcher, settings))
        app.add_route(f"{path}/generate_stream", GenerateStreamResource(dispatcher, settings))
    grps.add_routes(app, dispatcher, settings, guard)
    return app
