"""How rpcs become gRPC's method handlers: bytes in, bytes out, errors as statuses.

Every unary rpc is registered as if its request were a stream, so that the handler begins
before the message is there: only so can a client that never sends it be given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.frontends.grpc.client_deadlines import Overdue
from shmserve.frontends.grpc.error_statuses import as_error, details_of, status_of
from shmserve.frontends.grpc.thread_pools import check_admitted
from shmserve.frontends.oip.restricted_apis import Restricted

Unary = Callable[[bytes, grpc.ServicerContext], bytes]
Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def abort(context: grpc.ServicerContext, error: ShmserveError) -> None:
    """End the call with an error's status. Never returns: it raises."""
    context.abort(status_of(error), details_of(error))


# Categories of the setting grpc_restricted_protocol
_CATEGORIES = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "Watch": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ServerReflectionInfo": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "Predict": "inference",
    "PredictStreaming": "inference",
    **dict.fromkeys(("CheckLiveness", "CheckReadiness", "Online", "Offline"), "health"),
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "TraceSetting": "trace",
    "LogSettings": "logging",
    **dict.fromkeys(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
                    "model-repository"),
    **{f"{kind}SharedMemory{act}": "shared-memory" for kind in ("System", "Cuda")
       for act in ("Status", "Register", "Unregister")},
}  # fmt: skip


class Methods:
    """Makes handlers that run in given pools.

    Raises:
        ConfigError: `grpc_restricted_protocol` cannot be understood.
    """

    def __init__(self, overdue: Overdue, settings: Settings) -> None:
        self._overdue = overdue
        self._settings = settings
        self._restricted = Restricted(settings.grpc_restricted_protocol, grpc=True)

    def unary(
        self, name: str, run: Unary, pool: ThreadPoolExecutor, large: bool = False
    ) -> grpc.RpcMethodHandler:
        """One message, one answer. `large`: sending and taking them may be a matter of time."""

        def behave(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            try:
                self._admit(name, context)
                answer = run(self.first(requests, context, large), context)
            except grpc.RpcError:  # the client has gone
                raise
            except Exception as ex:
                error = as_error(ex, name)
            else:
                if large:
                    self._overdue.expect_taken(context, self.send_limit(len(answer)))
                return answer
            abort(context, error)
            raise AssertionError("unreachable: abort raises")

        return _in_pool(behave, pool, grpc.stream_unary_rpc_method_handler)

    def stream(self, name: str, run: Stream, pool: ThreadPoolExecutor) -> grpc.RpcMethodHandler:
        """Any number of messages and answers. Whoever does not take one is given up."""

        def behave(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                self._admit(name, context)
                for answer in run(requests, context):
                    self._overdue.expect(context, self.send_limit(len(answer)))
                    try:
                        yield answer
                    finally:
                        self._overdue.met(context)
                return
            except grpc.RpcError:
                raise
            except Exception as ex:
                error = as_error(ex, name)
            abort(context, error)

        return _in_pool(behave, pool, grpc.stream_stream_rpc_method_handler)

    def _admit(self, name: str, context: grpc.ServicerContext) -> None:
        check_admitted()
        if self._restricted:
            headers = {k: v for k, v in context.invocation_metadata() if isinstance(v, str)}
            self._restricted.check(_CATEGORIES[name], headers)

    def first(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, large: bool = False
    ) -> bytes:
        """The one message of a unary call.

        Raises:
            InvalidArgument: the call has none.
        """
        settings = self._settings
        limit_s = settings.grpc_message_timeout_s if large else settings.head_timeout_s
        self._overdue.expect(context, limit_s)
        try:
            for data in requests:
                return data
        finally:
            self._overdue.met(context)
        raise InvalidArgument("the call has no request message")

    def send_limit(self, nbytes: int) -> float:
        """How long a client may take to receive so many bytes."""
        return self._settings.send_timeout_s + nbytes / self._settings.min_bytes_per_s


def _in_pool(
    behave: Callable[..., Any],
    pool: ThreadPoolExecutor,
    make: Callable[[Callable[..., Any]], grpc.RpcMethodHandler],
) -> grpc.RpcMethodHandler:
    behave.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return make(behave)
