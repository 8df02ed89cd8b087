"""Rpcs of extensions that may block: their code runs in threads, beside the loop.

A stream is stepped through, one answer after another. The stream's own wait for the client's next
message is a greenlet's on the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from shmserve import waiting
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.frontends.extension_threads import ExtensionThreads
from shmserve.frontends.grpc.call_pools import SMALL_RUNNING, AwaitedRequests
from shmserve.frontends.grpc.handlers import Stream, Unary
from shmserve.frontends.grpc.rpc_methods import RpcContext


class BlockingRpcs:
    """Runs what may block, for one gRPC process."""

    def __init__(self, settings: Settings) -> None:
        # As many as calls of extensions may run at a time: their pools decide whose turn it is
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
                    with suppress(Unavailable):  # then it is closed once nobody has it any more
                        self._call(close)

        return answers


class _LoopRequests(Iterator[Any]):
    """The messages of a stream, taken on the loop and asked for beside it."""

    def __init__(self, requests: AwaitedRequests, on_loop: Any) -> None:
        self._inner = requests
        self._on_loop = on_loop

    def __next__(self) -> Any:
        return self._on_loop(self._inner.__next__)

    def first(self, limit_s: float) -> Any:
        return self._on_loop(self._inner.first, limit_s)

    @contextmanager
    def working(self) -> Iterator[None]:
        """As `AwaitedRequests.working`."""
        work = self._inner.working()
        self._on_loop(work.__enter__)
        try:
            yield
        finally:
            self._on_loop(work.__exit__, None, None, None)
