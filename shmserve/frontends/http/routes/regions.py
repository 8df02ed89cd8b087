"""Shared-memory extension over HTTP."""

import falcon
import msgspec
from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.core.region_kinds import CUDA, SYSTEM
from shmserve.errors import InvalidArgument, PermissionDenied, Unauthenticated
from shmserve.frontends.http.request_caller import caller_of, connected_caller
from shmserve.frontends.http.route_table import Get, Routes
from shmserve.frontends.http.routes.inference.body_reader import small_body
from shmserve.frontends.oip.shared_memory import SharedMemory, parse_cuda, parse_system
from shmserve.protocol.oip import strict_parser
from shmserve.transport import rundir

_encode = msgspec.json.Encoder().encode
KINDS = (SYSTEM, CUDA)
_ACTIONS = ("status", "register", "unregister")


class ClientSocketPlace(Struct, frozen=True):
    """Path of the client socket, for programs on the server's host."""

    client_socket: str


class RegionResource:
    """Resource of /v2/{kind}sharedmemory[/region/{name}]/{action}."""

    def __init__(self, kind: str, action: str, regions: SharedMemory, settings: Settings) -> None:
        self._cuda = kind == CUDA
        self._kind = kind
        self._regions = regions
        self._settings = settings
        method = "on_get" if action == "status" else "on_post"
        setattr(self, method, getattr(self, f"_{action}"))
        if action == "status":
            self.on_head = self._status

    def _status(self, req: falcon.Request, resp: falcon.Response, name: str = "") -> None:
        status = self._regions.cuda_status if self._cuda else self._regions.status
        resp.data = _encode(status(caller_of(req.env), name))

    def _register(self, req: falcon.Request, resp: falcon.Response, name: str = "") -> None:
        if not name:
            raise InvalidArgument(
                f"'region name' is necessary to register {self._kind} shared memory region"
            )
        self._regions.require_on()
        document = strict_parser.loads(small_body(req.env, self._settings))
        caller = caller_of(req.env)
        if self._cuda:
            self._regions.register_cuda(caller, name, *parse_cuda(document))
        else:
            self._regions.register(caller, name, *parse_system(document))

    def _unregister(self, req: falcon.Request, resp: falcon.Response, name: str = "") -> None:
        self._regions.unregister(caller_of(req.env), name, self._kind)


def _client_socket(regions: SharedMemory, settings: Settings, access: Access) -> Get:
    """Return the resource with the client socket's path, for callers with a right to the socket."""
    place = _encode(ClientSocketPlace(rundir.client_socket(settings)))

    def tell(req: falcon.Request, resp: falcon.Response) -> None:
        caller = connected_caller(req.env)
        if caller.remote:
            raise PermissionDenied(
                "the client socket is for programs on the server's host that connect to it"
                " without a proxy"
            )
        try:
            access.check_client_socket("register", caller, "shared-memory")
        except Unauthenticated as ex:  # another key would not help
            raise PermissionDenied(ex.message) from None
        regions.require_on()
        resp.data = place

    return Get(tell)


def add_routes(routes: Routes, regions: SharedMemory, settings: Settings, access: Access) -> None:
    """Add all routes of the extension, and the route of the client socket's path."""
    tell = _client_socket(regions, settings, access)
    where = "/shmserve/client-socket"
    routes.add("shared-memory", where, tell, action="register", asks_itself=True)
    for kind in KINDS:
        for action in _ACTIONS:
            resource = RegionResource(kind, action, regions, settings)
            routes.add("shared-memory", f"/v2/{kind}sharedmemory/{action}", resource)
            single = f"/v2/{kind}sharedmemory/region/{{name:given}}/{action}"
            routes.add("shared-memory", single, resource)
