"""Metrics page and page of the HTTP API: their files, and the data that the metrics page polls.

The pages in `static/` are complete: nothing is fetched from other servers and no script is inline.
"""

import gzip
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

import falcon
import msgspec
from falcon import Request, Response

from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import compression
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.route_table import Get, Routes
from shmserve.frontends.oip.dashboard_data import DashboardData
from shmserve.waiting import beside

_encode = msgspec.json.Encoder().encode
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers revalidate before each use
    "Vary": "Accept-Encoding",
}
_SMALL = 2048  # bytes; smaller answers are not worth compressing
_MAX_QUERY = 128


class _File:
    """A file of the page, as sent to browsers."""

    def __init__(self, name: str, data: bytes) -> None:
        self._type = _TYPES[name.rpartition(".")[2]]
        self._data = data
        self._zipped = gzip.compress(data, 9, mtime=0)
        self._tag = falcon.ETag(hashlib.sha256(data).hexdigest()[:32])

    def answer(self, req: Request, resp: Response) -> None:
        resp.set_headers(_HEADERS)
        resp.set_header("ETag", self._tag.dumps())
        cached_tags = req.if_none_match or []
        if "*" in cached_tags or self._tag in cached_tags:
            resp.status = 304
            return
        resp.content_type = self._type
        resp.data = self._data
        if compression.takes_gzip(req.get_header("Accept-Encoding", default="")):
            resp.data = self._zipped
            resp.set_header("Content-Encoding", "gzip")


def page(root: str, name: str = "page.html") -> Get:
    """Return a page's resource, for / and other paths. `root`: URL of / relative to the path."""
    return Get(_File(name, _read(name).replace(b"{root}", root.encode())).answer)


class DashboardRoutes:
    """Responders for the page's requests."""

    def __init__(self, monitor: DashboardData, access: Access) -> None:
        self._monitor = monitor
        self._access = access
        names = sorted(entry.name for entry in _folder().iterdir())
        self._files = {
            name: _File(name, _read(name)) for name in names if not name.endswith(".html")
        }

    def asset(self, req: Request, resp: Response, name: str) -> None:
        file = self._files.get(name)
        if file is None:
            raise NotFound("the page has no such file")
        file.answer(req, resp)

    def data(self, req: Request, resp: Response) -> None:
        """Answer GET /monitor/data?level=second&since=0&life="""
        since = query_parameter(req, "since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= 15):
            raise InvalidArgument("since must be the number of a period")
        level, life = query_parameter(req, "level", "second"), query_parameter(req, "life", "")
        said = self._access.sees_errors(caller_of(req.env))
        body = beside(lambda: _encode(self._monitor.data(level, int(since), life, said)))
        resp.set_header("Cache-Control", "no-store")
        accept = req.get_header("Accept-Encoding", default="")
        if len(body) > _SMALL and compression.takes_gzip(accept):
            body = beside(compression.compress, [body], "gzip")
            resp.set_header("Content-Encoding", "gzip")
            resp.set_header("Vary", "Accept-Encoding")
        resp.data = body


def query_parameter(req: Request, name: str, default: str) -> str:
    """Return a short parameter of the query. Raise InvalidArgument if the parameter is too long."""
    value = req.get_param(name, default=default)
    if len(value) > _MAX_QUERY:
        raise InvalidArgument(f"{name} is longer than {_MAX_QUERY} characters")
    return value


def _folder() -> Traversable:
    return resources.files("shmserve.frontends.http").joinpath("static")


def _read(name: str) -> bytes:
    return _folder().joinpath(name).read_bytes()


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings, access: Access) -> None:
    """Add all routes of this module."""
    if not settings.dashboard:
        return
    responders = DashboardRoutes(DashboardData(dispatcher, settings), access)
    routes.add_page("statistics", "/", page("./"))
    routes.add_page("statistics", "/monitor/api", page("../", "api.html"))
    routes.add("statistics", "/monitor/assets/{name}", Get(responders.asset))
    routes.add("statistics", "/monitor/data", Get(responders.data))
