"""Event loop for models whose `execute` returns coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any

_STOP_S = 5.0
_LOOK_S = 0.05  # interval of `look`, in seconds

Outcome = tuple[object, BaseException | None]  # result and exception of a coroutine


class Tasks:
    """Event loop in a separate thread, shared by all requests of the model."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tasks", daemon=True)
        self._thread.start()

    def run(
        self, coroutine: Coroutine[Any, Any, object], fail: Callable[[BaseException], None]
    ) -> None:
        """Start a coroutine. `fail` is called with the exception if the coroutine raises one."""

        def done(future: Future[Outcome]) -> None:
            try:
                _, error = future.result()
            except CancelledError as ex:
                error = ex
            if error is not None:
                fail(error)

        self._start(coroutine).add_done_callback(done)

    def wait_for(self, coroutine: Coroutine[Any, Any, object], look: Callable[[], None]) -> object:
        """Run a coroutine and return the result, or raise the coroutine's exception. `look` is
        called every `_LOOK_S` seconds meanwhile. There is no time limit."""
        future = self._start(coroutine)
        while not wait([future], _LOOK_S).done:
            look()
        result, error = future.result()
        del future
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # breaks the cycle of error and frame, which would keep inputs

    def _start(self, coroutine: Coroutine[Any, Any, object]) -> Future[Outcome]:
        return asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop)

    def close(self) -> None:
        """Stop the loop. Unfinished coroutines are dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _outcome(coroutine: Coroutine[Any, Any, object]) -> Outcome:
    try:
        return await coroutine, None
    except BaseException as ex:  # SystemExit would end the loop
        return None, ex
