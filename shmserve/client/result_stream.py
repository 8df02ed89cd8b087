"""Result stream: the answers to one request, each as soon as it arrives."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Protocol

from shmserve.client.result import Result
from shmserve.client.wire.cancel_scope import CancelScope
from shmserve.client.wire.inference_error import InferenceError


class AnswerSource(Protocol):
    """Answers to a request that has been sent."""

    def next(self) -> Result | InferenceError | None:
        """Return the next result, or the InferenceError of a single answer; None: the stream has
        ended. Raise InferenceError if the stream failed; no further answer comes."""

    def close(self) -> None:
        """End the request and release its resources. Idempotent."""


class ResultStream:
    """Iterator over results, and a context manager that closes the stream.

    The first `next` sends the request and starts the deadline. After an InferenceError of a single
    answer, `next` continues with the following answer. Closing the stream early, or dropping the
    last reference, cancels the request.
    """

    def __init__(self, begin: Callable[[], AnswerSource], owner: object = None) -> None:
        """Make a stream; `owner` is kept referenced as long as the stream lives."""
        self._owner = owner
        self._begin: Callable[[], AnswerSource] | None = begin
        self._answers: AnswerSource | None = None
        self._scope = CancelScope()
        # held while waiting for an answer, and while ending the stream
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Result:
        with self._lock:
            try:
                result = self._scope.run(self._next) if self._begin or self._answers else None
            except BaseException:
                self._end()
                raise
            if result is None:
                self._end()
                raise StopIteration
        if isinstance(result, InferenceError):
            raise result
        return result

    def close(self) -> None:
        """Cancel the rest of the stream. Callable from any thread; a thread that waits for an
        answer gets an InferenceError."""
        self._scope.cancel()
        with self._lock:
            self._end()

    def _next(self) -> Result | InferenceError | None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._answers = begin()
        assert self._answers is not None
        return self._answers.next()

    def _end(self) -> None:
        answers, self._answers, self._begin = self._answers, None, None
        if answers is not None:
            answers.close()

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a forked child must not cancel its parent's request
            with contextlib.suppress(Exception):
                self.close()
