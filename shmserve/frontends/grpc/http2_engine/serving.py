"""Shared state of all connections of the engine."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.grpc.handlers import RpcServices
from shmserve.frontends.grpc.http2_engine.call_head import Methods
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.http2_engine.rpc_runs import RpcRuns
from shmserve.frontends.http2 import Limits
from shmserve.frontends.oip.origins import Origins


class Serving(Struct, eq=False):
    """Shared state of all connections.

    Attributes:
        hosts: hosts that a call may name.
        growth: thread that makes memory, because the loop must not wait.
        connections: open `ServerConnection`s.
    """

    loop: EventLoop
    methods: Methods
    limits: Limits
    runs: RpcRuns
    settings: Settings
    hosts: Origins
    growth: ThreadPoolExecutor
    connections: OpenConnections[Any]


def serving_of(services: RpcServices, settings: Settings, loop: EventLoop) -> Serving:
    """Return the shared state for these services."""
    return Serving(
        loop,
        {
            f"/{service}/{name}": method
            for service, methods in services.items()
            for name, method in methods.items()
        },
        limits_of(settings),
        RpcRuns(settings),
        settings,
        Origins(settings, settings.grpc_bind, socket.gethostname()),
        ThreadPoolExecutor(1, thread_name_prefix="slots"),
        OpenConnections(settings.max_connections, settings.max_caller_share),
    )


def limits_of(settings: Settings) -> Limits:
    """Return the limits of a connection."""
    return Limits(
        header_timeout_s=settings.head_timeout_s,
        frame_stall_s=settings.body_timeout_s,
        send_stall_s=settings.send_timeout_s,
        keepalive_s=settings.grpc_keepalive_time_s,
        keepalive_timeout_s=settings.grpc_keepalive_timeout_s,
        keepalive_without_calls=settings.grpc_keepalive_without_calls,
        min_ping_interval_s=settings.grpc_min_ping_interval_s,
    )
