"""Data plane: parts shared by all calls of a process."""

from collections.abc import Callable

from msgspec import Struct

from shmserve.config import Settings
from shmserve.dispatch.calls.request_counting import RequestCounting
from shmserve.dispatch.pool.forwarded_outputs import ForwardingMemory
from shmserve.dispatch.pool.load_balancer import LoadBalancer
from shmserve.dispatch.traces.tracing import Tracer


class DataPlane(Struct, frozen=True):
    """Shared parts. `next_number`: returns a request number never used before."""

    memory: ForwardingMemory
    executors: LoadBalancer
    counting: RequestCounting
    tracer: Tracer
    settings: Settings
    next_number: Callable[[], int]
