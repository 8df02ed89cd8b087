"""The HTTP application: which path leads where."""

from __future__ import annotations

import falcon

from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.frontends.http import failures, grps
from shmserve.frontends.http.infer import InferResource
from shmserve.frontends.http.regions import add_routes
from shmserve.frontends.http.resources import (
    LiveResource,
    ModelConfigResource,
    ModelReadyResource,
    ModelResource,
    ReadyResource,
    ServerResource,
)
from shmserve.frontends.oip.regions import Regions
from shmserve.frontends.oip.seam import Dispatcher

# A model's paths stand once without and once with a version
_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")


def create_app(
    dispatcher: Dispatcher, settings: Settings
) -> falcon.App[falcon.Request, falcon.Response]:
    """The WSGI application of one HTTP worker."""
    app: falcon.App[falcon.Request, falcon.Response] = falcon.App(media_type="application/json")
    app.add_error_handler(Exception, failures.on_unexpected)
    app.add_error_handler(falcon.HTTPError, failures.on_http_error)
    app.add_error_handler(ShmserveError, failures.on_shmserve_error)
    app.add_route("/v2", ServerResource(settings))
    app.add_route("/v2/health/live", LiveResource())
    app.add_route("/v2/health/ready", ReadyResource(dispatcher))
    regions = Regions(dispatcher, settings)
    add_routes(app, regions, settings)
    for path in _MODEL:
        app.add_route(path, ModelResource(dispatcher))
        app.add_route(f"{path}/ready", ModelReadyResource(dispatcher))
        app.add_route(f"{path}/config", ModelConfigResource(dispatcher))
        app.add_route(f"{path}/infer", InferResource(dispatcher, settings, regions))
    grps.add_routes(app, dispatcher, settings)
    return app
