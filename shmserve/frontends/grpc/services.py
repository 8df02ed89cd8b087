"""How services are added to the gRPC server by extensions."""

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

# What an rpc does: run inferences, answer from what this process knows, wait for the coordinator.
# Streams are always inferences.
Work = Literal["inference", "quick", "asking"]


class Services:
    """Makes handlers, in the pools of the server with their limits, and adds services of them."""

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
            name: of the rpc, for the log.
            category: of the restricted APIs.
            run: takes the bytes of the message and gives those of the answer. What it raises of
                `shmserve.errors` becomes the call's status.
            work: what it does.
            large: its messages may be, so they have more time.
            action: what not every caller may do (`frontends.oip.origins`), if it does that.
            never_blocks: `run` waits for nothing but `dispatcher`, and hands long work to
                `shmserve.waiting.beside`: it runs on the loop that serves all calls, not in a
                thread.

        Raises:
            ValueError: there is no such category.
        """
        if not never_blocks:
            run = self._blocking.unary(run)
        return self._methods.unary(name, category, run, self._pools[work], large, action)

    def stream(
        self, name: str, category: Category, run: Stream, never_blocks: bool = False
    ) -> RpcMethod:
        """As `unary`, of any number of messages and answers."""
        if not never_blocks:
            run = self._blocking.stream(run)
        return self._methods.stream(name, category, run, self._streams)

    def first(self, requests: Iterator[bytes], context: RpcContext) -> bytes:
        """Return the one message of a stream that has only answers.

        Raises:
            InvalidArgument: there is none.
        """
        awaited: Any = requests  # as `run` of a stream gets them
        message: bytes = self._methods.first(awaited)
        return message

    def add(self, full_name: str, handlers: dict[str, RpcMethod]) -> None:
        """A service, with the handlers of its rpcs by their names.

        Raises:
            ValueError: there is such a service.
        """
        if self.added.setdefault(full_name, handlers) is not handlers:
            raise ValueError(f"gRPC service {full_name} is there twice")


class GrpcExtension(Protocol):
    """An extension of the group `extensions.GRPC_SERVICES`: adds its services.

    Called once in each gRPC process, before it takes calls. Reflection shows services whose
    descriptors are in protobuf's default pool.
    """

    def __call__(self, services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
        """Add services. What is raised here keeps the process from starting.

        Args:
            services: takes them.
            dispatcher: the way to the models; it outlives the server.
            settings: all settings; `Settings.extension` has the extension's own.
        """
        ...


def add_extensions(services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
    """The services of all extensions.

    Raises:
        ConfigError: one cannot be imported.
    """
    for extension in extensions.load_all(extensions.GRPC_SERVICES).values():
        extension(services, dispatcher, settings)
