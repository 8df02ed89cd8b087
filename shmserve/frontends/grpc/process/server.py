"""gRPC server of a process: rpcs, handlers and limits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from google.protobuf.message_factory import GetMessageClass

from shmserve._generated import grpc_service_pb2 as pb
from shmserve._generated import health_pb2
from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.call_pools import AwaitedRequests, CallPool, CallPools, ClientDeadlines
from shmserve.frontends.grpc.callers import CallAccess, FindCaller
from shmserve.frontends.grpc.handlers import Methods, RpcMethod
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.inference.model_infer import Inferences
from shmserve.frontends.grpc.inference.model_stream import serve as serve_stream
from shmserve.frontends.grpc.inference.stream_requests import METHOD as STREAM
from shmserve.frontends.grpc.inference.stream_requests import Streams
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.rpcs.control_rpcs import RepositoryResources, ServerResources
from shmserve.frontends.grpc.rpcs.health import Health
from shmserve.frontends.grpc.rpcs.metadata_rpcs import RegionResources, Resources, Rpcs, as_unary
from shmserve.frontends.grpc.rpcs.reflection import SERVICE as REFLECTION
from shmserve.frontends.grpc.rpcs.reflection import Reflection
from shmserve.frontends.grpc.services import Services, add_extensions
from shmserve.frontends.grpc.tensor_message import ModelSubjects, TensorIntake
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.frontends.presented_keys import PresentedKeys
from shmserve.transport import looking

_log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
INFER = "ModelInfer"

_TELL_S = 0.3  # seconds between "not ready" and refusing calls
_LEAVE_S = 5.0  # longest wait for connections without calls: a healthy client closes at once
_LOOK_S = 0.02


class GrpcServer:
    """gRPC server of a process. `server`: the engine; addresses are added before `start`."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, find: FindCaller) -> None:
        looking.permit(settings.look_us)
        loop = EventLoop(settings.grpc_threads)
        self._overdue = ClientDeadlines(loop.at)
        self._pools = pools = CallPools(settings, self._overdue)
        keys = PresentedKeys(settings, dispatcher.count_key)
        access = CallAccess(Access(settings, os.geteuid()), find, keys)
        self._methods = Methods(self._overdue, settings, access, dispatcher)
        self._idle_reflection_s = settings.head_timeout_s
        regions = SharedMemory(dispatcher, settings)
        inferences = Inferences(dispatcher, settings, regions, access)
        limit = settings.grpc_stream_requests
        queue = min(settings.max_queue, settings.max_model_requests)
        self._streams = streams = Streams(inferences, limit, settings.grpc_threads, queue)
        health = Health(dispatcher, SERVICE.full_name, lambda: self._streams.draining)
        resources = Resources(dispatcher, settings, health.ready)
        memory = RegionResources(regions, access).rpcs()
        asking = ServerResources(dispatcher, settings, access).rpcs()
        loading = RepositoryResources(dispatcher, settings, access).rpcs()
        methods = self._methods
        intake = TensorIntake(dispatcher.memory, inferences.announced)
        handlers = {
            INFER: methods.unary(
                INFER,
                "inference",
                inferences.infer,
                pools.inferences,
                True,
                None,
                intake,
                ModelSubjects(dispatcher),
            ),
            STREAM: methods.stream(
                STREAM, "inference", partial(serve_stream, streams), pools.streams, views=True
            ),
        }
        handlers |= self._message_handlers(resources.health_rpcs(), pools.health)
        handlers |= self._message_handlers(resources.rpcs(), pools.quick)
        handlers |= self._message_handlers(memory, pools.asking)
        handlers |= self._message_handlers(asking, pools.asking)
        handlers |= self._message_handlers(loading, pools.loading, large=True)
        services = Services(methods, pools, settings)
        services.add(SERVICE.full_name, handlers)
        services.add(HEALTH.full_name, self._health_handlers(health))
        add_extensions(services, dispatcher, settings)
        if settings.grpc_reflection:
            services.add(*self._reflection_handlers([*services.added]))
        self.server = Http2Engine(services.added, settings, loop)

    def start(self, failed: Callable[[], object] = lambda: None) -> None:
        """Serve. `failed`: called when an error has ended the loop of the connections."""
        self.server.start(failed)

    def drain(self, limit_s: float) -> None:
        """Report "not ready", refuse new calls, finish accepted calls, and stop. Streams and
        watchers end with the last request, since clients keep them open for ever."""
        deadline = time.monotonic() + limit_s
        self._streams.draining = True
        time.sleep(min(_TELL_S, limit_s))
        self.server.stop(max(0.0, deadline - time.monotonic()))
        leave_by = min(deadline, time.monotonic() + _LEAVE_S)
        while self.busy or (self.server.connected and time.monotonic() < leave_by):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        if self.busy:
            _log.warning("%d calls did not end within drain_timeout_s", self.busy)
        self.close()

    @property
    def busy(self) -> int:
        """The number of inferences that run or whose answers are being sent."""
        return self._pools.inferences.count + self._streams.busy + len(self._overdue)

    def close(self) -> None:
        """Cancel all calls and stop."""
        self.server.stop(None).wait()

    # ------------------------------------------------------------------ handlers

    def _message_handlers(
        self, rpcs: Rpcs, pool: CallPool, large: bool = False
    ) -> dict[str, RpcMethod]:
        handlers = {}
        for name, (category, rpc) in rpcs.items():
            request = GetMessageClass(SERVICE.methods_by_name[name].input_type)
            handlers[name] = self._methods.unary(
                name, category, as_unary(request, rpc), pool, large
            )
        return handlers

    def _health_handlers(self, health: Health) -> dict[str, RpcMethod]:
        def watch(requests: AwaitedRequests, context: RpcContext) -> Iterator[bytes]:
            return health.watch(self._methods.first(requests), context)

        return {
            "Check": self._methods.unary("Check", "health", health.check, self._pools.health),
            "Watch": self._methods.stream(
                "Watch", "health", watch, self._pools.watchers, large=False
            ),
        }

    def _reflection_handlers(self, services: list[str]) -> tuple[str, dict[str, RpcMethod]]:
        reflection = Reflection(services)

        def answer(requests: Iterator[bytes], context: RpcContext) -> Iterator[bytes]:
            return reflection.serve(requests)

        name = "ServerReflectionInfo"
        handler = self._methods.stream(
            name, "metadata", answer, self._pools.reflections, self._idle_reflection_s, large=False
        )
        return REFLECTION.full_name, {name: handler}
