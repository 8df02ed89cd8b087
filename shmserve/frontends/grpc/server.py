"""The gRPC server of one process: which rpc leads where, in which threads, under which limits."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.announced_inputs import ModelSubjects
from shmserve.frontends.grpc.call_turns import PoolSize
from shmserve.frontends.grpc.callers import CallAccess, Callers
from shmserve.frontends.grpc.client_deadlines import ClientDeadlines
from shmserve.frontends.grpc.control_rpcs import RepositoryResources, ServerResources
from shmserve.frontends.grpc.grpcio_engine import grpcio_engine
from shmserve.frontends.grpc.handlers import Methods
from shmserve.frontends.grpc.health import Health
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.grpc.infer import Inferences
from shmserve.frontends.grpc.metadata_rpcs import (
    RegionResources,
    Resources,
    Rpcs,
    as_message,
    as_unary,
)
from shmserve.frontends.grpc.rpc_methods import Engine, RpcContext, RpcMethod, RpcServices
from shmserve.frontends.grpc.services import Services, add_extensions
from shmserve.frontends.grpc.stream import METHOD as STREAM
from shmserve.frontends.grpc.stream import Streams
from shmserve.frontends.grpc.tensor_message import TensorIntake
from shmserve.frontends.grpc.thread_pools import BoundedPool, Refusals
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.frontends.presented_keys import PresentedKeys

_log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
INFER = "ModelInfer"

_SMALL_THREADS = 64  # each for health, what the registry answers, what asks the coordinator
_SMALL_CALLS = 1024
_LOADING_THREADS = 16  # for what waits for models to be loaded
_LOADING_CALLS = 64
_REFLECTIONS = 16
_TELL_S = 0.3  # between "not ready" and refusing calls
_LEAVE_S = 5.0  # for connections without calls: a client that lives goes at once
_LOOK_S = 0.02


class GrpcServer:
    """One server. `server` is its engine, for addresses to be added before `start`."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, callers: Callers) -> None:
        self._overdue = ClientDeadlines()
        keys = PresentedKeys(settings, dispatcher.count_key)
        access = CallAccess(Access(settings, os.geteuid()), callers, keys)
        self._methods = Methods(self._overdue, settings, access, dispatcher)
        self._idle_reflection_s = settings.head_timeout_s
        self._make_pools(settings)
        regions = SharedMemory(dispatcher, settings)
        inferences = Inferences(dispatcher, settings, regions, access)
        self._streams = Streams(inferences, self._stream_threads, settings.grpc_stream_requests)
        health = Health(dispatcher, SERVICE.full_name, lambda: self._streams.draining)
        resources = Resources(dispatcher, settings, health.ready)
        memory = RegionResources(regions, access).rpcs()
        asking = ServerResources(dispatcher, settings, access).rpcs()
        loading = RepositoryResources(dispatcher, settings, access).rpcs()
        methods = self._methods
        intake = TensorIntake(dispatcher.memory, inferences.announced, inferences.is_quick_to_read)
        handlers = {
            INFER: methods.unary(
                INFER,
                "inference",
                inferences.infer,
                self._calls,
                True,
                None,
                intake,
                ModelSubjects(dispatcher),
            ),
            STREAM: methods.stream(
                STREAM, "inference", self._streams.serve, self._stream_calls, views=True
            ),
        }
        handlers |= self._message_handlers(resources.health_rpcs(), self._health)
        handlers |= self._message_handlers(resources.rpcs(), self._quick)
        handlers |= self._message_handlers(memory, self._asking)
        handlers |= self._message_handlers(asking, self._asking)
        handlers |= self._message_handlers(loading, self._loading, large=True)
        services = Services(
            self._methods,
            {"inference": self._calls, "quick": self._quick, "asking": self._asking},
            self._stream_calls,
        )
        services.add(SERVICE.full_name, handlers)
        services.add(HEALTH.full_name, self._health_handlers(health))
        add_extensions(services, dispatcher, settings)
        if settings.grpc_reflection:
            services.add(*self._reflection_handlers([*services.added]))
        self.server = self._engine(services.added, settings)

    def _engine(self, services: RpcServices, settings: Settings) -> Engine:
        if settings.grpc_server == "http2":
            return Http2Engine(services, settings, self._overdue)
        engine: Engine = grpcio_engine(services, settings, self._refusals)
        return engine

    def adopt(self, sockets: Sequence[socket.socket], credentials: Any) -> list[str]:
        """Serve on sockets that listen already, too; returns what they are bound to.

        `credentials`: as `Ports.add_secure_port` has them; None: there is no TLS.
        """
        if not isinstance(self.server, Http2Engine):
            return []  # then there are none: `supervisor.launch` sees to it
        return [self.server.adopt(sock, credentials) for sock in sockets]

    def lives(self) -> bool:
        """Whether calls can be served, as far as can be seen from here: asked once a second."""
        return not isinstance(self.server, Http2Engine) or self.server.lives()

    def _make_pools(self, settings: Settings) -> None:
        make = partial(BoundedPool, refusals=(refusals := Refusals()))
        self._refusals = refusals
        http2 = settings.grpc_server == "http2"
        size = partial(PoolSize, silent_hold_threads=not http2)
        share, small_s = settings.max_caller_share, settings.grpc_small_silence_s
        most_calls = settings.grpc_max_calls
        self._calls = make(
            "infer",
            size(
                settings.grpc_threads,
                most_calls,
                share,
                settings.grpc_silence_s,
                subject_share=settings.max_model_share if http2 else 1.0,
                subject_limit=settings.max_model_requests,
            ),
            why=f"{most_calls} inferences run or wait already (grpc_max_calls)",
        )
        streams, watchers = settings.grpc_max_streams, settings.grpc_max_watchers
        self._stream_calls = make(
            "stream",
            size(streams, streams, share, settings.grpc_stream_silence_s),
            why=f"{streams} streams are open already (grpc_max_streams)",
        )
        self._watchers = make(
            "watch",
            size(watchers, watchers, share, small_s),
            why=f"{watchers} watch already (grpc_max_watchers)",
        )
        busy = "too many calls at a time"
        small = size(_SMALL_THREADS, _SMALL_CALLS, share, small_s)
        self._health = make("health", small, why=busy)
        self._quick = make("quick", small, why=busy)
        self._asking = make("ask", small, why=busy)
        loading = size(_LOADING_THREADS, _LOADING_CALLS, share, settings.grpc_silence_s)
        self._loading = make("load", loading, why=busy)
        reflections = size(_REFLECTIONS, _REFLECTIONS, share, small_s)
        self._reflections = make("reflection", reflections, why=busy)
        self._pools = (
            *(self._calls, self._stream_calls, self._watchers, self._health, self._quick),
            *(self._asking, self._loading, self._reflections),
        )
        most = streams * (settings.grpc_stream_requests + 1)  # a reader each
        self._stream_threads = make("stream-work", size(most, most), why=busy)

    def start(self) -> None:
        self._overdue.start(self._pools)
        self.server.start()

    def drain(self, limit_s: float) -> None:
        """Say that we are not ready, refuse what is new, finish what was accepted, stop.

        Streams and watchers end with the last request: clients keep them open for ever.
        """
        deadline = time.monotonic() + limit_s
        self._streams.draining = True
        time.sleep(min(_TELL_S, limit_s))
        self.server.stop(max(0.0, deadline - time.monotonic()))
        leave_by = min(deadline, time.monotonic() + _LEAVE_S)
        while self.busy or (self._connected and time.monotonic() < leave_by):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        if self.busy:
            _log.warning("%d calls did not end within the drain's limit", self.busy)
        self.close()

    @property
    def _connected(self) -> bool:
        """Whether clients that were asked to go have not: a call of theirs may be on its way."""
        return isinstance(self.server, Http2Engine) and self.server.connected

    @property
    def busy(self) -> int:
        """Inferences that are worked on or whose answers are being sent."""
        return self._calls.count + self._streams.busy + len(self._overdue)

    def close(self) -> None:
        """Cancel whatever runs."""
        self.server.stop(None).wait()
        self._overdue.close()
        for pool in (*self._pools, self._stream_threads, self._refusals):
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ handlers

    def _message_handlers(
        self, rpcs: Rpcs, pool: BoundedPool, large: bool = False
    ) -> dict[str, RpcMethod]:
        handlers = {}
        for name, (category, rpc) in rpcs.items():
            request = GetMessageClass(SERVICE.methods_by_name[name].input_type)
            handlers[name] = self._methods.unary(
                name, category, as_unary(request, rpc), pool, large
            )
        return handlers

    def _health_handlers(self, health: Health) -> dict[str, RpcMethod]:
        def watch(requests: Iterator[bytes], context: RpcContext) -> Iterator[bytes]:
            return health.watch(self._methods.first(requests, context), context)

        return {
            "Check": self._methods.unary("Check", "health", health.check, self._health),
            "Watch": self._methods.stream("Watch", "health", watch, self._watchers),
        }

    def _reflection_handlers(self, services: list[str]) -> tuple[str, dict[str, RpcMethod]]:
        servicer = reflection.ReflectionServicer([*services, reflection.SERVICE_NAME])
        parse = as_message(reflection_pb2.ServerReflectionRequest)

        def answer(requests: Iterator[bytes], context: RpcContext) -> Iterator[bytes]:
            for response in servicer.ServerReflectionInfo(map(parse, requests), context):
                yield response.SerializeToString()

        name = "ServerReflectionInfo"
        handler = self._methods.stream(
            name, "metadata", answer, self._reflections, self._idle_reflection_s
        )
        return reflection.SERVICE_NAME, {name: handler}
