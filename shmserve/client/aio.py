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
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from shmserve.client import api
from shmserve.client.result import Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.wire.cancel_scope import CancelScope
from shmserve.client.wire.credentials import Secret
from shmserve.client.wire.inference_error import CLOSED, LATE, InferenceError

__all__ = ["AsyncClient", "AsyncResultStream", "connect"]

P = ParamSpec("P")
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
    key: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    cert_key: str | os.PathLike[str] | None = None,
) -> AsyncIterator[AsyncClient]:
    """Connect to a server, and close the client at the end of the context.

    Args:
        url, control, max_bytes, max_device_bytes, lanes, require_shared_memory: as of
            `shmserve.client.connect`.
        key, key_file, ca, cert, cert_key: likewise.
        timeout: default seconds until a call must have ended.
        concurrency: limit of concurrent calls; further calls wait for a free thread.

    Raises:
        InferenceError, ValueError: as `shmserve.client.connect`.
    """
    # hidden, because asyncio's debug log has the arguments of slow calls
    key = None if key is None else Secret(key)
    calls = _Calls(concurrency)
    try:
        limits = {"max_bytes": max_bytes, "max_device_bytes": max_device_bytes, "timeout": timeout}
        flags = {"lanes": lanes, "require_shared_memory": require_shared_memory}
        files = {"key_file": key_file, "ca": ca, "cert": cert, "cert_key": cert_key}
        options: dict[str, Any] = {**limits, **flags, **files, "key": key}
        blocking = await calls.run(timeout, api.connect, url, control, **options)
        client = AsyncClient(blocking, calls, timeout)
    except BaseException:
        await calls.close()
        raise
    try:
        yield client
    finally:
        await client.close()


def _coroutine(
    call: Callable[Concatenate[api.Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make a coroutine method from a `Client` method with a `timeout`."""

    @functools.wraps(call)
    async def ask(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        timeout_s: Any = options.get("timeout") or client._timeout_s
        bounded = {**options, "timeout": timeout_s}
        return await client._calls.run(timeout_s, call, client._client, *args, **bounded)

    return ask


class AsyncClient:
    """Connection to one server, for any number of tasks. Must not be used across a fork."""

    def __init__(self, client: api.Client, calls: _Calls, timeout_s: float) -> None:
        self._client = client
        self._calls = calls
        self._timeout_s = timeout_s

    @property
    def shared_memory(self) -> bool:
        """Return True if tensors go through shared memory now, False if over HTTP."""
        return self._client.shared_memory

    @property
    def why_no_shared_memory(self) -> str:
        """Return the reason why tensors travel over HTTP, as `Client.why_no_shared_memory`."""
        return self._client.why_no_shared_memory

    async def device_memory(self, device: int = 0) -> bool:
        """Return True if arrays of a GPU stay there; raises as `Client.device_memory`."""
        return await self._calls.run(self._timeout_s, self._client.device_memory, device)

    async def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: int | None = None
    ) -> Any:
        """Return an uninitialised array in shared memory. Arguments and errors: `Client.empty`."""
        empty = self._client.empty
        return await self._calls.run(self._timeout_s, empty, shape, dtype, device=device)

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

        return await self._calls.run(timeout_s, call)

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
        timeout_s, ready = timeout or self._timeout_s, self._client.ready
        try:
            return await self._calls.run(timeout_s, ready, model, version, timeout=timeout_s)
        except InferenceError:  # the deadline has passed
            return False

    metadata = _coroutine(api.Client.metadata)
    config = _coroutine(api.Client.config)
    statistics = _coroutine(api.Client.statistics)
    models = _coroutine(api.Client.models)
    load = _coroutine(api.Client.load)
    unload = _coroutine(api.Client.unload)

    async def close(self) -> None:
        """End all calls, unregister all memory, close the connections. Results stay readable."""
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
            result = await self._calls.run(max(self._until - now, _LEAST_S), self._next)
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

    async def run(self, timeout_s: float, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a call in a thread and return its result. Raise InferenceError if the call missed the
        deadline, `close` ended the call, or the client was closed before."""
        if self._closed:
            raise InferenceError(0, CLOSED)
        scope = CancelScope()
        self._scopes.add(scope)
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(timeout_s):
                ask = functools.partial(call, *args, **options)
                return await loop.run_in_executor(self._threads, scope.run, ask)
        except TimeoutError as ex:
            raise InferenceError(0, LATE) from ex
        finally:
            self._scopes.discard(scope)
            scope.cancel()

    async def close(self) -> None:
        """Cancel all calls, also calls without a thread yet; end the threads. Idempotent."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()
        await asyncio.to_thread(self._threads.shutdown)
