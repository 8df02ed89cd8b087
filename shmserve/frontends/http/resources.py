"""Health and metadata: everything that is answered from the registry alone."""

from __future__ import annotations

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.errors import Unavailable
from shmserve.frontends.http.routes.paths import checked_version
from shmserve.frontends.oip import metadata
from shmserve.frontends.oip.seam import Dispatcher

_encode = msgspec.json.Encoder().encode
_LIVE = b'{"live":true}'
_READY = b'{"ready":true}'


class ServerResource:
    """GET /v2."""

    def __init__(self, settings: Settings) -> None:
        self._body = _encode(metadata.server_metadata(settings))

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = self._body

    on_head = on_get


class LiveResource:
    """GET /v2/health/live: this process answers, so it is."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _LIVE

    on_head = on_get


class ReadyResource:
    """GET /v2/health/ready: whether every model that should be loaded is."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        if not self._dispatcher.snapshot().ready:
            raise Unavailable("the server is not ready")
        resp.data = _READY

    on_head = on_get


class ModelResource:
    """GET /v2/models/{m}[/versions/{v}]."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_get(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        resp.data = _encode(metadata.model_metadata(entry, self._dispatcher.snapshot()))

    on_head = on_get


class ModelReadyResource:
    """GET /v2/models/{m}[/versions/{v}]/ready."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_get(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        entry = self._dispatcher.model(name, checked_version(version) if version else "")
        if entry.state is not ModelState.READY or not entry.instances:
            raise Unavailable(f"model '{name}' version {entry.spec.version} is not ready")
        resp.data = _encode({"name": name, "ready": True})

    on_head = on_get


class ModelConfigResource:
    """GET /v2/models/{m}[/versions/{v}]/config."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_get(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        resp.data = entry.spec.config_json.encode()

    on_head = on_get
