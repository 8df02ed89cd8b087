"""Health and metadata: all answers made from the registry alone."""

import msgspec
from falcon import Request, Response

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.errors import Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.route_table import MODEL_PATHS, Get, Routes, checked_version
from shmserve.frontends.oip import metadata

_encode = msgspec.json.Encoder().encode


class MetadataRoutes:
    """Responders for health and metadata, one per path."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._server = _encode(metadata.server_metadata(settings))

    def server(self, req: Request, resp: Response) -> None:
        resp.data = self._server

    def live(self, req: Request, resp: Response) -> None:
        resp.data = b'{"live":true}'  # a process that answers is alive

    def ready(self, req: Request, resp: Response) -> None:
        """Answer 200 if every required model is loaded, else 503."""
        snapshot = self._dispatcher.snapshot()
        if not snapshot.ready:
            raise Unavailable(f"the server is not ready: {snapshot.why_not_ready}")
        resp.data = b'{"ready":true}'

    def model(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        entry = self._dispatcher.ready_model(name, checked_version(version))
        resp.data = _encode(metadata.model_metadata(entry, self._dispatcher.snapshot()))

    def model_ready(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        entry = self._dispatcher.model(name, checked_version(version))
        if entry.state is not ModelState.READY or not entry.instances:
            raise Unavailable(f"model '{name}' version {entry.spec.version} is not ready")
        resp.data = _encode({"name": name, "ready": True})

    def model_config(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        entry = self._dispatcher.ready_model(name, checked_version(version))
        resp.data = entry.spec.config.json()


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add all routes of this module."""
    responders = MetadataRoutes(dispatcher, settings)
    routes.add("metadata", "/v2", Get(responders.server))
    routes.add("health", "/v2/health/live", Get(responders.live))
    routes.add("health", "/v2/health/ready", Get(responders.ready))
    for path in MODEL_PATHS:
        routes.add("metadata", path, Get(responders.model))
        routes.add("health", f"{path}/ready", Get(responders.model_ready))
        routes.add("model-config", f"{path}/config", Get(responders.model_config))
