"""Model repository extension over HTTP."""

import base64
import binascii
import functools
from typing import Any

import msgspec
from falcon import Request, Response

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.route_table import Routes
from shmserve.frontends.http.routes.inference.body_reader import open_body, small_body
from shmserve.frontends.oip.repository import Repository, refuse_repository
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip import strict_parser
from shmserve.waiting import beside_if_large

_encode = msgspec.json.Encoder().encode
_BESIDES = 4 << 20  # bytes for configuration, keys and braces around base64 of files


class RepositoryRoutes:
    """Responders for POST below /v2/repository[/{repository}]."""

    def __init__(self, repository: Repository, settings: Settings) -> None:
        self._repository = repository
        self._settings = settings

    def on_post_index(self, req: Request, resp: Response, repository: str = "") -> None:
        refuse_repository(repository)
        ready = self._document(small_body(req.env, self._settings)).get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        resp.data = _encode(self._repository.index(ready))

    def on_post_load(self, req: Request, resp: Response, name: str, repository: str = "") -> None:
        refuse_repository(repository)
        limit = self._settings.max_override_bytes * 4 // 3 + _BESIDES
        body = open_body(req.env, self._settings).read_rest(limit, "max_override_bytes")
        parameters = self._parameters(body)
        given = {k: _value(k, v) for k, v in parameters.items()}
        self._repository.load(name, given, lambda: caller_of(req.env))

    def on_post_unload(self, req: Request, resp: Response, name: str, repository: str = "") -> None:
        refuse_repository(repository)
        body = small_body(req.env, self._settings)
        dependents = self._parameters(body).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("parameter 'unload_dependents' must be a boolean")
        self._repository.unload(name, dependents)

    def _document(self, body: bytes) -> dict[str, Any]:
        document: Any = {}
        if body.strip():
            document = beside_if_large(len(body), strict_parser.loads, body)
        if not isinstance(document, dict):
            raise InvalidArgument("the request must be a JSON object")
        return document

    def _parameters(self, body: bytes) -> dict[str, Any]:
        parameters = self._document(body).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' must be a JSON object")
        return parameters


def add_routes(routes: Routes, repository: Repository, settings: Settings) -> None:
    """Add all routes of the extension."""
    resource = RepositoryRoutes(repository, settings)
    for prefix in ("/v2/repository", "/v2/repository/{repository}"):
        model = f"{prefix}/models/{{name}}"
        routes.add("model-repository", f"{prefix}/index", resource, "index", action="use")
        routes.add("model-repository", f"{model}/load", resource, suffix="load")
        routes.add("model-repository", f"{model}/unload", resource, suffix="unload")


def _value(key: str, value: Any) -> Parameter | bytes:
    if key.startswith("file:"):
        if isinstance(value, str):
            try:
                return beside_if_large(
                    len(value), functools.partial(base64.b64decode, validate=True), value
                )
            except (binascii.Error, ValueError):
                pass
        raise InvalidArgument(f"parameter '{ascii(key[:100])[1:-1]}' must be a base64 string")
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgument(f"parameter '{ascii(key[:100])[1:-1]}' must be a string")
