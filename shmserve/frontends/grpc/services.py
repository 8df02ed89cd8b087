"""gRPC services of extensions: how extensions add services to the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from shmserve import extensions
from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.blocking_rpcs import BlockingRpcs
from shmserve.frontends.grpc.call_pools import CallPool, CallPools
from shmserve.frontends.grpc.handlers import Methods, RpcMethod, Stream, Unary
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.restricted_apis import Category

# Work of an rpc: run inferences, answer from the memory of this process, or wait for the
# coordinator. Streams always count as inferences.
Work = Literal["inference", "quick", "asking"]


class Services:
    """Makes handlers in the server's pools, under the pools' limits, and adds their services."""

    def __init__(self, methods: Methods, pools: CallPools, settings: Settings) -> None:
        self._methods = methods
        self._blocking = BlockingRpcs(settings)
        self._pools: Mapping[Work, CallPool] = {
            "inference": pools.inferences,
            "quick": pools.quick,
            "asking": pools.asking,
        }
        self._streams = pools.streams
        self.added: dict[str, dict[str, RpcMethod]] = {}

    def unary(
        self,
        name: str,
        category: Category,
        run: Unary,
        work: Work = "quick",
        large: bool = False,
        action: Action | None = None,
        never_blocks: bool = False,
    ) -> RpcMethod:
        """Return the handler of an rpc with one message and one answer.

        Args:
            name: name of the rpc, for the log.
            category: category of the restricted APIs.
            run: takes the bytes of the message and returns the bytes of the answer. An error of
                `shmserve.errors` becomes the call's status.
            work: kind of work, which decides the pool.
            large: True if messages may be large; clients then have more time.
            action: action of the rpc that needs permission (`frontends.oip.origins`), if any.
            never_blocks: True if `run` waits for nothing but `dispatcher`, and hands long work to
                `shmserve.waiting.beside`. Then `run` runs on the loop that serves all calls, else
                in a thread.

        Raises:
            ValueError: there is no such category.
        """
        if not never_blocks:
            run = self._blocking.unary(run)
        return self._methods.unary(name, category, run, self._pools[work], large, action)

    def stream(
        self, name: str, category: Category, run: Stream, never_blocks: bool = False
    ) -> RpcMethod:
        """Return the handler of an rpc with many messages and answers. Arguments as in `unary`."""
        if not never_blocks:
            run = self._blocking.stream(run)
        return self._methods.stream(name, category, run, self._streams)

    def first(self, requests: Iterator[bytes], context: RpcContext) -> bytes:
        """Return the one message of a stream that has only answers.

        Raises:
            InvalidArgument: the client sent no message.
        """
        awaited: Any = requests  # the type that a stream's `run` gets
        message: bytes = self._methods.first(awaited)
        return message

    def add(self, full_name: str, handlers: dict[str, RpcMethod]) -> None:
        """Add a service, with the handlers of its rpcs by name.

        Raises:
            ValueError: a service of this name exists.
        """
        if self.added.setdefault(full_name, handlers) is not handlers:
            raise ValueError(f"gRPC service {full_name} is there twice")


class GrpcExtension(Protocol):
    """An extension of the group `extensions.GRPC_SERVICES`, which adds services.

    Called once in each gRPC process, before the process takes calls. Reflection shows services
    whose descriptors are in protobuf's default pool.
    """

    def __call__(self, services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
        """Add services. An exception keeps the process from starting.

        Args:
            services: takes the new services.
            dispatcher: access to the models; outlives the server.
            settings: all settings; `Settings.extension` has the extension's own.
        """
        ...


def add_extensions(services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the services of all extensions."""
    for extension in extensions.load_all(extensions.GRPC_SERVICES).values():
        extension(services, dispatcher, settings)
