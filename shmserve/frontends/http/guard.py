"""Restricted APIs over HTTP: a middleware that is only there if something is restricted."""

from __future__ import annotations

from typing import Any

import falcon

from shmserve.frontends.oip.restricted_apis import Restricted

# By the last part of a route, and else by its beginning
_BY_END = {
    "ready": "health",
    "live": "health",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "config": "model-config",
    "stats": "statistics",
    "setting": "trace",
    "logging": "logging",
    "": "statistics",  # the metrics page at /
    "metrics": "statistics",
}
_BY_START = (
    ("/monitor/", "statistics"),
    ("/grps/v1/monitor/", "statistics"),
    ("/v2/repository/", "model-repository"),
    ("/v2/systemsharedmemory/", "shared-memory"),
    ("/v2/cudasharedmemory/", "shared-memory"),
    ("/grps/v1/health/", "health"),
    ("/grps/v1/infer/", "inference"),
)


class Guard:
    """Refuses requests without the secret of their category."""

    def __init__(self, restricted: Restricted) -> None:
        self._restricted = restricted

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: Any, params: dict[str, Any]
    ) -> None:
        """Called once the route is known, before the body is looked at."""
        self._restricted.check(category(req.uri_template or ""), _Headers(req))

    def check_inference(self, req: falcon.Request) -> None:
        """The same for an inference that has no route: a model's own path."""
        self._restricted.check("inference", _Headers(req))


class _Headers:
    def __init__(self, req: falcon.Request) -> None:
        self._req = req

    def get(self, name: str, /) -> str | None:
        return self._req.get_header(name)


def category(template: str) -> str:
    """The category of a route, such as ``/v2/models/{name}/infer``."""
    for start, found in _BY_START:
        if template.startswith(start):
            return found
    return _BY_END.get(template.rpartition("/")[2], "metadata")
