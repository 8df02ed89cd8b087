"""Shared-memory extension over HTTP."""

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.core.region_kinds import CUDA, SYSTEM
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.route_table import Routes
from shmserve.frontends.http.routes.inference.body_reader import small_body
from shmserve.frontends.oip.shared_memory import SharedMemory, parse_cuda, parse_system
from shmserve.protocol.oip import strict_parser

_encode = msgspec.json.Encoder().encode
KINDS = (SYSTEM, CUDA)
_ACTIONS = ("status", "register", "unregister")


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


def add_routes(routes: Routes, regions: SharedMemory, settings: Settings) -> None:
    """Add all routes of the extension."""
    for kind in KINDS:
        for action in _ACTIONS:
            resource = RegionResource(kind, action, regions, settings)
            routes.add("shared-memory", f"/v2/{kind}sharedmemory/{action}", resource)
            single = f"/v2/{kind}sharedmemory/region/{{name:given}}/{action}"
            routes.add("shared-memory", single, resource)
