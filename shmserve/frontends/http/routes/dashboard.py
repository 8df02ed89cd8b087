"""The metrics page: its files, the data it polls, and GRPS's series.

Nothing is fetched from elsewhere and nothing runs inline; `static/` is the whole page.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.http import compression as coding
from shmserve.frontends.oip.dashboard_data import Monitor
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.grps.frontend.metric_series import UNKNOWN, GrpsSeries

_encode = msgspec.json.Encoder().encode
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # that is: ask whether it is still the same
    "Vary": "Accept-Encoding",
}
_SMALL = 2048  # bytes of an answer that is not worth compressing
_PAGE = "page.html"
# Where the page is served, and how its files are reached from there
_PAGES = {"/": "./", "/grps/v1/monitor/metrics": "../../../"}
_MAX_QUERY = 128


class _File:
    """One file of the page, ready to be sent."""

    def __init__(self, name: str, data: bytes) -> None:
        self._type = _TYPES[name.rpartition(".")[2]]
        self._data = data
        self._zipped = gzip.compress(data, 9, mtime=0)
        self._tag = falcon.ETag(hashlib.sha256(data).hexdigest()[:32])

    def answer(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.set_headers(_HEADERS)
        resp.set_header("ETag", self._tag.dumps())
        known = req.if_none_match or []
        if "*" in known or self._tag in known:
            resp.status = 304
            return
        resp.content_type = self._type
        resp.data = self._data
        if coding.takes_gzip(req.get_header("Accept-Encoding", default="")):
            resp.data = self._zipped
            resp.set_header("Content-Encoding", "gzip")


class PageResource:
    """GET / and GET /grps/v1/monitor/metrics. `root`: where / is, seen from there."""

    def __init__(self, root: str) -> None:
        self._file = _File(_PAGE, _read(_PAGE).replace(b"{root}", root.encode()))

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._file.answer(req, resp)

    on_head = on_get


class AssetResource:
    """GET /monitor/assets/{name}."""

    def __init__(self) -> None:
        names = sorted(entry.name for entry in _folder().iterdir())
        self._files = {name: _File(name, _read(name)) for name in names if name != _PAGE}

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        file = self._files.get(name)
        if file is None:
            raise NotFound("the page has no such file")
        file.answer(req, resp)

    on_head = on_get


class DataResource:
    """GET /monitor/data?level=second&since=0&life=."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        since = _parameter(req, "since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= 15):
            raise InvalidArgument("since must be the number of a period")
        level, life = _parameter(req, "level", "second"), _parameter(req, "life", "")
        body = _encode(self._monitor.data(level, int(since), life))
        resp.set_header("Cache-Control", "no-store")
        accept = req.get_header("Accept-Encoding", default="")
        if len(body) > _SMALL and coding.takes_gzip(accept):
            body = coding.compress([body], "gzip")
            resp.set_header("Content-Encoding", "gzip")
            resp.set_header("Vary", "Accept-Encoding")
        resp.data = body

    on_head = on_get


class SeriesResource:
    """GET /grps/v1/monitor/series?name=."""

    def __init__(self, series: GrpsSeries) -> None:
        self._series = series

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        found = self._series.get(_parameter(req, "name", ""))
        if found is None:
            resp.content_type = "text/plain; charset=utf-8"
            resp.data = UNKNOWN.encode()
            return
        resp.data = _encode(found)


def _parameter(req: falcon.Request, name: str, default: str) -> str:
    value = req.get_param(name, default=default)
    if len(value) > _MAX_QUERY:
        raise InvalidArgument(f"{name} is longer than {_MAX_QUERY} characters")
    return value


def _folder() -> Traversable:
    return resources.files("shmserve.frontends.http").joinpath("static")


def _read(name: str) -> bytes:
    return _folder().joinpath(name).read_bytes()


def add_routes(
    app: falcon.App[falcon.Request, falcon.Response], dispatcher: Dispatcher, settings: Settings
) -> None:
    """All routes of this module."""
    if not settings.dashboard:
        return
    for path, root in _PAGES.items():
        app.add_route(path, PageResource(root))
    app.add_route("/monitor/assets/{name}", AssetResource())
    app.add_route("/monitor/data", DataResource(Monitor(dispatcher, settings)))
    app.add_route("/grps/v1/monitor/series", SeriesResource(GrpsSeries(dispatcher)))
