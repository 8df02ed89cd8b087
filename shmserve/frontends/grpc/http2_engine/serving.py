"""Shared state of all connections of the engine."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmserve.config import Settings
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.grpc.handlers import RpcServices
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.http2_engine.rpc_runs import RpcRuns
from shmserve.frontends.http2 import Limits
from shmserve.frontends.oip.origins import Origins


class Serving:
    """Shared state of all connections.

    Attributes:
        hosts: hosts that a call may name.
        growth: thread that makes memory, because the loop must not wait.
        connections: open `ServerConnection`s.
    """

    def __init__(self, services: RpcServices, settings: Settings, loop: EventLoop) -> None:
        self.loop = loop
        self.methods = {
            f"/{service}/{name}": method
            for service, methods in services.items()
            for name, method in methods.items()
        }
        self.limits = _limits(settings)
        self.runs = RpcRuns(settings)
        self.settings = settings
        self.hosts = Origins(settings, settings.grpc_bind, socket.gethostname())
        self.growth = ThreadPoolExecutor(1, thread_name_prefix="slots")
        self.connections: OpenConnections[Any] = OpenConnections(
            settings.max_connections, settings.max_caller_share
        )


def _limits(settings: Settings) -> Limits:
    return Limits(
        header_timeout_s=settings.head_timeout_s,
        frame_stall_s=settings.body_timeout_s,
        send_stall_s=settings.send_timeout_s,
        keepalive_s=settings.grpc_keepalive_time_s,
        keepalive_timeout_s=settings.grpc_keepalive_timeout_s,
        keepalive_without_calls=settings.grpc_keepalive_without_calls,
        min_ping_interval_s=settings.grpc_min_ping_interval_s,
    )
