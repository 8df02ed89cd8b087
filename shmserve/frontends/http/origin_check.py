"""First check of every HTTP request: the host it is for, and the web page it comes from."""

from collections.abc import Callable

import falcon

from shmserve.core.access import Action
from shmserve.errors import InvalidArgument, PermissionDenied
from shmserve.frontends.oip.origins import Origins, is_loopback

_ANY = "0.0.0.0"
_REMEMBERED = 256
_UNIX = ("", "/", "\0")  # first characters of REMOTE_ADDR, only for clients of Unix sockets
_PREFLIGHT_S = "600"
_EXPOSED = (
    "Inference-Header-Content-Length, shmserve-receipt, Server-Timing, X-Request-ID, Retry-After"
)

Marks = tuple[str | None, str | None, str | None, str, bool]


class OriginCheck:
    """Middleware that checks `Host`, `Origin` and `Sec-Fetch-Site` of each request.

    Clients send equal fields again and again, so admitted combinations are cached.

    Programs on this host may call the server `0.0.0.0`, as GRPS's documents do, for requests with
    the action "use". Web pages can send a GET to `0.0.0.0`, too, and browsers then send neither
    `Origin` nor `Sec-Fetch-Site`.

    Attributes:
        _action_of: returns the action of a request.
        pages: paths of pages for people, which links on other sites may open.
    """

    def __init__(self, origins: Origins, action_of: Callable[[falcon.Request], Action]) -> None:
        self._origins = origins
        self._action_of = action_of
        self._admitted: set[Marks] = set()
        self.pages: set[str] = set()

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Check a request before routing. Falcon calls this method."""
        env = req.env
        # Falcon would route paths with several leading slashes like paths with one
        if env["PATH_INFO"][:2] == "//":
            raise falcon.HTTPRouteNotFound
        marks = (
            env.get("HTTP_HOST"),
            env.get("HTTP_ORIGIN"),
            env.get("HTTP_SEC_FETCH_SITE"),
            env["wsgi.url_scheme"],
            env.get("REMOTE_ADDR", "?")[:1] in _UNIX,
        )
        if marks not in self._admitted:
            self._look(req, resp, marks)

    def _look(self, req: falcon.Request, resp: falcon.Response, marks: Marks) -> None:
        host, origin, site, scheme, unix = marks
        named = host is not None
        # Browsers open no Unix sockets, and clients of Unix sockets send any Host they like
        if host is not None:
            if not unix:
                of_target = req.env.get("RAW_URI", "/")[:1] not in "/*"
                try:
                    self._origins.check_host(host, "request target" if of_target else "header Host")
                except PermissionDenied:
                    if not _calls_any_address(host, req) or self._action_of(req) != "use":
                        raise
                    named = False
        elif req.env["SERVER_PROTOCOL"] == "HTTP/1.1" and req.env.get("REMOTE_PORT"):
            raise InvalidArgument("header Host is missing")
        if origin is not None or site is not None:
            if req.path in self.pages and _follows_link(req):
                return
            self._origins.check_page(host or "", origin or "", site or "", scheme)
            if origin is not None and self._origins.listed(origin):
                _share(req, resp, origin)
                return
        if not named:
            return  # more than the marks decided in this case, so nothing is cached
        if len(self._admitted) >= _REMEMBERED:
            self._admitted = set()
        self._admitted.add(marks)


def _calls_any_address(host: str, req: falcon.Request) -> bool:
    """Return True if a program on this host calls the server by the address of all interfaces."""
    return host.partition(":")[0] == _ANY and is_loopback(req.env.get("REMOTE_ADDR", ""))


def _follows_link(req: falcon.Request) -> bool:
    """Return True if the page opens in a window of its own, where no other page can read it."""
    return (
        req.method == "GET"
        and req.get_header("Sec-Fetch-Mode") == "navigate"
        and req.get_header("Sec-Fetch-Dest") == "document"
    )


def _share(req: falcon.Request, resp: falcon.Response, origin: str) -> None:
    """Allow a page of this origin to read the answer, and answer a preflight request (CORS)."""
    resp.set_header("Access-Control-Allow-Origin", origin)
    resp.append_header("Vary", "Origin")
    resp.set_header("Access-Control-Expose-Headers", _EXPOSED)
    requested_method = req.get_header("Access-Control-Request-Method")
    if req.method != "OPTIONS" or requested_method is None:
        return
    resp.set_header("Access-Control-Allow-Methods", "GET, HEAD, POST")
    fields = req.get_header("Access-Control-Request-Headers")
    if fields is not None and fields.isascii() and fields.isprintable():
        resp.set_header("Access-Control-Allow-Headers", fields)
    resp.set_header("Access-Control-Max-Age", _PREFLIGHT_S)
    resp.status = falcon.HTTP_204
    resp.complete = True
