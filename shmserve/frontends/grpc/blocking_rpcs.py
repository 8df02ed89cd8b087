"""Blocking rpcs of extensions: their code runs in threads, beside the loop.

A stream's code runs one step at a time, each step up to the next answer. Waiting for the client's
next message is done by a greenlet on the loop.
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
    """Runs extension code that may block, for one gRPC process."""

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
