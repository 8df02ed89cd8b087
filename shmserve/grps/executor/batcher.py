"""Dynamic batching of a project's model: requests that come close together run as one.

The thread of the first request waits for others and runs them all; theirs wait for it.
So nothing runs while nobody asks, and batches of one model may overlap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shmserve.errors import DeadlineExceeded, Internal
from shmserve.grps.repository.project_files import Batching

Run = Callable[[list[Any], list[Any]], list[Any]]


class _Batch:
    __slots__ = ("contexts", "deadline", "full", "futures", "messages")

    def __init__(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.full = threading.Event()
        self.messages: list[Any] = []
        self.contexts: list[Any] = []
        self.futures: list[Future[Any]] = []


class Batcher:
    """`run` takes lists of messages and contexts and gives as many messages."""

    def __init__(self, settings: Batching, run: Run) -> None:
        self._size = settings.max_batch_size
        self._timeout_s = settings.timeout_us / 1e6
        self._run = run
        self._open: _Batch | None = None
        self._lock = threading.Lock()

    def infer(self, message: Any, context: Any, timeout_s: float | None) -> Any:
        """The answer to one message; runs with others, for at most `timeout_s` seconds.

        Raises:
            DeadlineExceeded: the batch was not done in time.
            Exception: whatever the model raised, for every request of the batch.
        """
        future: Future[Any] = Future()
        with self._lock:
            leads = self._open is None
            batch = self._open = self._open or _Batch(self._timeout_s)
            batch.messages.append(message)
            batch.contexts.append(context)
            batch.futures.append(future)
            if len(batch.futures) >= self._size:
                self._open = None
                batch.full.set()
        if leads:
            self._lead(batch)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the model's own TimeoutError
                raise
            raise DeadlineExceeded("the batch of the request was not done in time") from None

    def _lead(self, batch: _Batch) -> None:
        batch.full.wait(max(0.0, batch.deadline - time.monotonic()))
        with self._lock:
            if self._open is batch:
                self._open = None
        try:
            results = self._run(batch.messages, batch.contexts)
            if len(results) != len(batch.futures):
                raise Internal(f"a batch of {len(batch.futures)} gave {len(results)} messages")
        except BaseException as ex:
            for future in batch.futures:
                future.set_exception(ex)
            return
        for future, result in zip(batch.futures, results, strict=True):
            future.set_result(result)
