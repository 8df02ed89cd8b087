"""grpc.health.v1: readiness of the server and of each model, asked once or watched."""

from collections.abc import Callable, Iterator

from shmserve import waiting
from shmserve._generated import health_pb2
from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import NotFound, Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.rpcs.metadata_rpcs import as_message

SERVICE = "grpc.health.v1.Health"
_PERIOD_S = 0.25  # seconds between checks of a watched status
_Status = health_pb2.HealthCheckResponse
_request = as_message(health_pb2.HealthCheckRequest)


class Health:
    """Service grpc.health.v1.Health. `service`: service name that stands for the server, besides
    the empty name."""

    def __init__(self, dispatcher: DispatchApi, service: str, draining: Callable[[], bool]) -> None:
        self._dispatcher = dispatcher
        self._servers = ("", service)
        self._draining = draining

    def check(self, data: bytes, context: RpcContext) -> bytes:
        """Check: return the present status."""
        status = self._status(str(_request(data).service))
        if status == _Status.SERVICE_UNKNOWN:
            raise NotFound("no such service, and no model of that name")
        return _encoded(status)

    def watch(self, data: bytes, context: RpcContext) -> Iterator[bytes]:
        """Watch: yield the present status, and each later status that differs, until the client
        ends the call."""
        service = str(_request(data).service)
        ended = waiting.event()
        if not context.add_callback(ended.set):
            return
        sent: int | None = None
        while not ended.is_set():
            status = self._status(service)
            if status != sent:
                sent = status
                yield _encoded(status)
            ended.wait(_PERIOD_S)

    def ready(self) -> bool:
        """Return True if the server is ready and not draining."""
        snapshot = self._snapshot()
        return snapshot is not None and snapshot.ready and not self._draining()

    def _snapshot(self) -> Snapshot | None:
        try:
            return self._dispatcher.snapshot()
        except Unavailable:
            return None

    def _status(self, service: str) -> int:
        if service in self._servers:
            ready = self.ready()
        else:
            snapshot = self._snapshot()
            entry = snapshot.newest(service) if snapshot is not None else None
            if entry is None:
                return int(_Status.SERVICE_UNKNOWN)
            usable = entry.state is ModelState.READY and bool(entry.instances)
            ready = usable and not self._draining()
        return int(_Status.SERVING if ready else _Status.NOT_SERVING)


def _encoded(status: int) -> bytes:
    message: bytes = _Status(status=status).SerializeToString()
    return message
