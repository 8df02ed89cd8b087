"""The model repository extension over HTTP."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.routes.body_reader import open_intake
from shmserve.frontends.oip.repository import Repository, refuse_repository
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip import strict_parser as oip_strict

_encode = msgspec.json.Encoder().encode
_MAX_BODY = 64 * 1024
_BESIDES = 4 << 20  # configuration, keys and braces around base64 of files


class _Resource:
    def __init__(self, repository: Repository, settings: Settings) -> None:
        self._repository = repository
        self._settings = settings

    def _document(self, req: falcon.Request, limit: int = _MAX_BODY) -> dict[str, Any]:
        body = open_intake(req.env, self._settings).read_rest(limit)
        if not body.strip():
            return {}
        document = oip_strict.loads(body, self._settings)
        if not isinstance(document, dict):
            raise InvalidArgument("the request must be a JSON object")
        return document

    def _parameters(self, document: dict[str, Any]) -> dict[str, Any]:
        parameters = document.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' must be a JSON object")
        return parameters


class IndexResource(_Resource):
    """POST /v2/repository[/{repository}]/index."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, repository: str = "") -> None:
        refuse_repository(repository)
        ready = self._document(req).get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        resp.data = _encode(self._repository.index(ready))


class LoadResource(_Resource):
    """POST /v2/repository[/{repository}]/models/{name}/load."""

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, repository: str = ""
    ) -> None:
        refuse_repository(repository)
        limit = self._settings.max_override_bytes * 4 // 3 + _BESIDES
        parameters = self._parameters(self._document(req, limit))
        self._repository.load(name, {k: _value(k, v) for k, v in parameters.items()})


class UnloadResource(_Resource):
    """POST /v2/repository[/{repository}]/models/{name}/unload."""

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, repository: str = ""
    ) -> None:
        refuse_repository(repository)
        dependents = self._parameters(self._document(req)).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("parameter 'unload_dependents' must be a boolean")
        self._repository.unload(name, dependents)


def add_routes(
    app: falcon.App[falcon.Request, falcon.Response], repository: Repository, settings: Settings
) -> None:
    """All routes of the extension."""
    load, unload = LoadResource(repository, settings), UnloadResource(repository, settings)
    for prefix in ("/v2/repository", "/v2/repository/{repository}"):
        app.add_route(f"{prefix}/index", IndexResource(repository, settings))
        app.add_route(f"{prefix}/models/{{name}}/load", load)
        app.add_route(f"{prefix}/models/{{name}}/unload", unload)


def _value(key: str, value: Any) -> Parameter | bytes:
    if key.startswith("file:"):
        if isinstance(value, str):
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                pass
        raise InvalidArgument(f"parameter '{ascii(key[:100])[1:-1]}' must be a base64 string")
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgument(f"parameter '{ascii(key[:100])[1:-1]}' must be a string")
