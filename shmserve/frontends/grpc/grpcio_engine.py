"""The engine of the `grpcio` library: our rpcs as its method handlers.

Every unary rpc is registered as if its request were a stream, so that its thread begins
before the message is there: only so can a client that never sends it be given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc

from shmserve.config import Settings
from shmserve.frontends import caller_numbers
from shmserve.frontends.grpc.rpc_methods import RpcMessage, RpcMethod, RpcServices
from shmserve.frontends.grpc.thread_pools import Refusals

_COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}


def grpcio_engine(services: RpcServices, settings: Settings, refusals: Refusals) -> grpc.Server:
    """A server of these services. `refusals` is never used: every handler names its pool."""
    handlers = [
        grpc.method_handlers_generic_handler(
            name, {rpc: _handler(method) for rpc, method in methods.items()}
        )
        for name, methods in services.items()
    ]
    return grpc.server(
        refusals,
        handlers,
        options=options(settings),
        compression=_COMPRESSIONS[settings.grpc_compression],
    )


def _handler(method: RpcMethod) -> grpc.RpcMethodHandler:
    behave: Any = partial(_behave, method)
    behave.experimental_thread_pool = method.pool
    streams = method.streams
    make = (
        grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    )
    return make(behave)


def _behave(method: RpcMethod, requests: Iterator[RpcMessage], context: Any) -> Any:
    context.caller_number = context.client_number = caller_numbers.of_peer(context.peer())
    return method.behave(requests, context)


def options(settings: Settings) -> list[tuple[str, int]]:
    """gRPC's channel arguments for a server with these settings."""
    most = settings.grpc_max_message_bytes
    made = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", most),
        ("grpc.keepalive_time_ms", _ms(settings.grpc_keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(settings.grpc_keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", int(settings.grpc_keepalive_without_calls)),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            _ms(settings.grpc_min_ping_interval_s),
        ),
    ]
    if settings.grpc_max_connection_age_s:
        made.append(("grpc.max_connection_age_ms", _ms(settings.grpc_max_connection_age_s)))
    return made


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), (1 << 31) - 1)
