"""`ResultStream`: the answers to one request, each when it is there."""

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
    """The answers to a request that has been sent."""

    def next(self) -> Result | InferenceError | None:
        """The next one, or what it failed for, alone; None: there is none any more.

        Raises:
            InferenceError: no further one comes.
        """

    def close(self) -> None:
        """Nobody wants further answers: the request ends, what it holds is given back.
        Idempotent."""


class ResultStream:
    """An iterator, and a context manager that closes it.

    The request is sent when the first result is asked for; its deadline begins then. An
    InferenceError of one answer does not end the stream: `next` gives what comes behind it. A
    stream that is closed, or not referenced any more, before its end is cancelled.
    """

    def __init__(self, begin: Callable[[], AnswerSource], owner: object = None) -> None:
        """`owner`: lives as long as the stream."""
        self._owner = owner
        self._begin: Callable[[], AnswerSource] | None = begin
        self._answers: AnswerSource | None = None
        self._scope = CancelScope()
        self._lock = threading.Lock()  # of who waits for an answer, or ends it
        self._pid = os.getpid()

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Result:
        with self._lock:
            try:
                told = self._scope.run(self._next) if self._begin or self._answers else None
            except BaseException:
                self._end()
                raise
            if told is None:
                self._end()
                raise StopIteration
        if isinstance(told, InferenceError):
            raise told
        return told

    def close(self) -> None:
        """Cancel what is left of it. Any thread: one that waits for an answer gets an error."""
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
        if os.getpid() == self._pid:  # a forked child must not undo its parent's doing
            with contextlib.suppress(Exception):
                self.close()
