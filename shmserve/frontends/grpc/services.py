"""gRPC services of extensions: how extensions add services to the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, Protocol

from shmserve import extensions, waiting
from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.call_pools import SMALL_RUNNING, AwaitedRequests, CallPool, CallPools
from shmserve.frontends.grpc.handlers import Methods, RpcMethod, Stream, Unary
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.side_threads import ExtensionThreads

# Work of an rpc: run inferences, answer from the memory of this process, or wait for the
# coordinator. Streams always count as inferences.
Work = Literal["inference", "quick", "asking"]


class BlockingRpcs:
    """Runs extension code that may block, for one gRPC process, in threads beside the loop.

    A stream's code runs one step at a time, each step up to the next answer. Waiting for the
    client's next message is done by a greenlet on the loop.
    """

    def __init__(self, settings: Settings) -> None:
        # As many threads as extension calls may run at a time: the pools decide which call is next
        limit = settings.grpc_threads + 2 * SMALL_RUNNING + settings.grpc_max_streams
        self._call = ExtensionThreads(limit, "grpc_threads", settings.request_timeout_s).call

    def unary(self, run: Unary) -> Unary:
        """Return an rpc that runs `run` beside the loop."""
        return partial(self._call, run)

    def stream(self, run: Stream) -> Stream:
        """Return a stream whose answers `run` makes beside the loop."""

        def answers(requests: AwaitedRequests, context: RpcContext) -> Iterator[bytes]:
            waiter = waiting.installed.waiter
            assert waiter is not None, "rpcs run on a loop"
            messages: Any = _LoopRequests(requests, waiter.on_loop)
            made = iter(self._call(run, messages, context))
            ended = False
            try:
                while (answer := self._call(next, made, None)) is not None:
                    yield answer
                ended = True
            finally:
                if not ended and (close := getattr(made, "close", None)) is not None:
                    with suppress(Unavailable):  # else garbage collection closes the iterator
                        self._call(close)

        return answers


class _LoopRequests(Iterator[Any]):
    """Messages of a stream: a thread beside the loop asks, and the loop waits for the client."""

    def __init__(self, requests: AwaitedRequests, on_loop: Any) -> None:
        self._inner = requests
        self._on_loop = on_loop

    def __next__(self) -> Any:
        return self._on_loop(self._inner.__next__)

    def first(self, limit_s: float) -> Any:
        return self._on_loop(self._inner.first, limit_s)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on earlier requests, as `AwaitedRequests.working`."""
        work = self._inner.working()
        self._on_loop(work.__enter__)
        try:
            yield
        finally:
            self._on_loop(work.__exit__, None, None, None)


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
        """Return the one message of a stream that has only answers. Raise InvalidArgument if the
        client sent no message."""
        awaited: Any = requests  # the type that a stream's `run` gets
        message: bytes = self._methods.first(awaited)
        return message

    def add(self, full_name: str, handlers: dict[str, RpcMethod]) -> None:
        """Add a service, with the handlers of its rpcs by name. Raise ValueError if a service has
        the name already."""
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
