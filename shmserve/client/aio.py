"""Asyncio client: the calls of `shmserve.client` as coroutines.

    from shmserve.client import aio

    async with aio.connect("unix:/run/shmserve/http.sock") as client:
        result = await client.infer("digits", {"image": image})

Each call runs the blocking call of `shmserve.client` in a thread, because copying inputs and
registering memory would block the event loop. The number of threads, and so of concurrent calls,
is limited. A cancelled task, or a task whose deadline passes, returns at once. The connection or
lane of the call is then shut down, which ends the request at the server and frees the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from shmserve.client import api
from shmserve.client.result import Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.wire.cancel_scope import CancelScope
from shmserve.client.wire.inference_error import CLOSED, LATE, InferenceError

__all__ = ["AsyncClient", "AsyncResultStream", "connect"]

T = TypeVar("T")
_LEAST_S = 0.001  # 0 would mean the client's own timeout


@contextlib.asynccontextmanager
async def connect(
    url: str,
    control: str | None = None,
    *,
    max_bytes: int = 1 << 30,
    max_device_bytes: int = 1 << 30,
    timeout: float = 300.0,
    lanes: bool = True,
    require_shared_memory: bool = False,
    concurrency: int = 16,
) -> AsyncIterator[AsyncClient]:
    """Connect to a server, and close the client at the end of the context.

    Args:
        url, control, max_bytes, max_device_bytes, lanes, require_shared_memory: as of
            `shmserve.client.connect`.
        timeout: default seconds until a call must have ended.
        concurrency: limit of concurrent calls; further calls wait for a free thread.

    Raises:
        InferenceError, ValueError: as `shmserve.client.connect`.
    """
    calls = _Calls(concurrency)
    try:
        make = functools.partial(
            api.connect,
            url,
            control,
            max_bytes=max_bytes,
            max_device_bytes=max_device_bytes,
            timeout=timeout,
            lanes=lanes,
            require_shared_memory=require_shared_memory,
        )
        client = AsyncClient(await calls.run(make, timeout), calls, timeout)
    except BaseException:
        await calls.close()
        raise
    try:
        yield client
    finally:
        await client.close()


class AsyncClient:
    """Connection to one server, for any number of tasks. Must not be used across a fork."""

    def __init__(self, client: api.Client, calls: _Calls, timeout_s: float) -> None:
        self._client = client
        self._calls = calls
        self._timeout_s = timeout_s

    @property
    def shared_memory(self) -> bool:
        """Return True if tensors go through shared memory now, False if tensors travel over
        HTTP."""
        return self._client.shared_memory

    @property
    def why_no_shared_memory(self) -> str:
        """Return the reason why tensors travel over HTTP, as `Client.why_no_shared_memory`."""
        return self._client.why_no_shared_memory

    async def device_memory(self, device: int = 0) -> bool:
        """Return True if arrays of a GPU stay there; raises as `Client.device_memory`."""
        return await self._calls.run(
            functools.partial(self._client.device_memory, device), self._timeout_s
        )

    async def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: int | None = None
    ) -> Any:
        """Return an uninitialised array in shared memory; arguments and errors are those of
        `Client.empty`."""
        return await self._calls.run(
            functools.partial(self._client.empty, shape, dtype, device=device), self._timeout_s
        )

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        version: str = "",
        request_id: str = "",
        timeout: float | None = None,
        receipt: bool = False,
        device: int | None = None,
    ) -> Result:
        """Run a model; arguments and errors are those of `Client.infer`.

        The timeout covers the whole call, including the wait for a thread and any retries.
        """
        timeout_s = timeout or self._timeout_s
        until = time.monotonic() + timeout_s

        def call() -> Result:
            return self._client.infer(
                model,
                inputs,
                outputs,
                parameters,
                version=version,
                request_id=request_id,
                timeout=max(until - time.monotonic(), _LEAST_S),
                receipt=receipt,
                device=device,
            )

        return await self._calls.run(call, timeout_s)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncResultStream:
        """Run a model that answers any number of times. Arguments and errors are those of
        `Client.stream`, but all errors come from the stream.

        The timeout covers the whole stream and starts when the first answer is awaited.
        """
        timeout_s = timeout or self._timeout_s

        def begin(left_s: float) -> ResultStream:
            return self._client.stream(
                model, inputs, outputs, parameters, timeout=left_s, **options
            )

        return AsyncResultStream(self._calls, begin, timeout_s)

    async def ready(
        self, model: str = "", version: str = "", *, timeout: float | None = None
    ) -> bool:
        """Return True if the server or a model is ready, as `Client.ready`."""
        try:
            return await self._ask(self._client.ready, model, version, timeout=timeout)
        except InferenceError:  # the deadline has passed
            return False

    async def metadata(
        self, model: str = "", version: str = "", *, timeout: float | None = None
    ) -> Any:
        """Return the description of the server or of a model, as `Client.metadata`."""
        return await self._ask(self._client.metadata, model, version, timeout=timeout)

    async def config(self, model: str, version: str = "", *, timeout: float | None = None) -> Any:
        """Return a model's configuration, as `Client.config`."""
        return await self._ask(self._client.config, model, version, timeout=timeout)

    async def statistics(
        self, model: str = "", version: str = "", *, timeout: float | None = None
    ) -> Any:
        """Return counts and times of requests, as `Client.statistics`."""
        return await self._ask(self._client.statistics, model, version, timeout=timeout)

    async def models(self, *, timeout: float | None = None) -> Any:
        """Return the list of the model repository, as `Client.models`."""
        return await self._ask(self._client.models, timeout=timeout)

    async def load(
        self, model: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> None:
        """Load a model and wait until it is ready, as `Client.load`."""
        await self._ask(self._client.load, model, config, timeout=timeout)

    async def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model, as `Client.unload`."""
        await self._ask(self._client.unload, model, timeout=timeout)

    async def _ask(self, call: Callable[..., T], *args: Any, timeout: float | None) -> T:
        timeout_s = timeout or self._timeout_s
        ask = functools.partial(call, *args, timeout=timeout_s)
        return await self._calls.run(ask, timeout_s)

    async def close(self) -> None:
        """End all calls, unregister all memory and close the connections; results stay
        readable."""
        try:
            await self._calls.close()
        finally:
            await asyncio.to_thread(self._client.close)


class AsyncResultStream:
    """Asynchronous iterator over results, and a context manager that closes the stream. Otherwise
    as `ResultStream`.

    For one task at a time. A task that is cancelled while it waits for an answer ends the stream.
    """

    def __init__(
        self, calls: _Calls, begin: Callable[[float], ResultStream], timeout_s: float
    ) -> None:
        self._calls = calls
        self._begin = begin
        self._timeout_s = timeout_s
        self._until = 0.0
        self._stream: ResultStream | None = None
        self._over = False

    def __aiter__(self) -> AsyncResultStream:
        return self

    async def __anext__(self) -> Result:
        now = time.monotonic()
        self._until = self._until or now + self._timeout_s
        try:
            result = await self._calls.run(self._next, max(self._until - now, _LEAST_S))
        except asyncio.CancelledError:  # the thread may have received an answer, which is lost
            self._over = True
            raise
        if result is None:
            raise StopAsyncIteration
        return result

    async def aclose(self) -> None:
        """Cancel the rest of the stream. Idempotent."""
        self._over = True
        if self._stream is not None:
            await asyncio.to_thread(self._stream.close)

    def _next(self) -> Result | None:
        """Return the next result, None at the end. Runs in a thread of `_Calls`."""
        if self._stream is None and not self._over:
            self._stream = self._begin(max(self._until - time.monotonic(), _LEAST_S))
        return None if self._over or self._stream is None else next(self._stream, None)

    async def __aenter__(self) -> AsyncResultStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Calls:
    """Threads for blocking calls, at most `concurrency` at a time."""

    def __init__(self, concurrency: int) -> None:
        self._threads = ThreadPoolExecutor(concurrency, "shmserve-client")
        self._scopes: set[CancelScope] = set()
        self._closed = False

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run a call in a thread and return its result.

        Raises:
            InferenceError: the call missed the deadline, `close` ended the call, or the client was
                closed before.
        """
        if self._closed:
            raise InferenceError(0, CLOSED)
        scope = CancelScope()
        self._scopes.add(scope)
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(self._threads, scope.run, call)
        except TimeoutError as ex:
            raise InferenceError(0, LATE) from ex
        finally:
            self._scopes.discard(scope)
            scope.cancel()

    async def close(self) -> None:
        """Cancel all calls, including calls that wait for a thread, and end the threads.
        Idempotent."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()
        await asyncio.to_thread(self._threads.shutdown)
