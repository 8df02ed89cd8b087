"""The event loop of a model whose `execute` is a coroutine function."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.executor.backends.model_errors import from_exception

_log = logging.getLogger(__name__)

_STOP_S = 5.0


class Tasks:
    """One event loop in a thread of its own; all requests of the model share it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tasks", daemon=True)
        self._thread.start()

    def run(
        self, coroutine: Coroutine[Any, Any, object], fail: Callable[[ShmserveError], None]
    ) -> None:
        """Start a coroutine; `fail` is called if it raises."""

        def done(future: Future[object]) -> None:
            try:
                future.result()
            except (Exception, SystemExit, CancelledError) as ex:
                fail(from_exception(ex, _log, "execute failed"))

        asyncio.run_coroutine_threadsafe(coroutine, self._loop).add_done_callback(done)

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """What a coroutine gives; raises what it raises. It may take as long as a model may."""

        async def outcome() -> tuple[object, BaseException | None]:
            try:
                return await coroutine, None
            except (Exception, SystemExit) as ex:  # which would end the loop
                return None, ex

        result, error = asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # it would have this frame, and this frame it, and the request's inputs

    def close(self) -> None:
        """Stop; what still runs is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
