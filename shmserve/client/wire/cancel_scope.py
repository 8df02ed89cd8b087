"""Ending a request from another thread than the one that waits for its answer.

A scope is in force in the thread that runs under it, so that what waits for the server need not
be handed it; scopes may lie in each other, and any of them ends the wait. What waits says how its
wait is interrupted, by shutting down its own end: to the server that is a client that has gone, and
the request ends there as well.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from shmserve.client.wire.inference_error import InferenceError

T = TypeVar("T")


class CancelScope:
    """Of one call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._cancelled = False

    def run(self, call: Callable[[], T]) -> T:
        """What a call gives, if nobody cancels it.

        Raises:
            InferenceError: it was cancelled before its answer was there.
        """
        self._check()
        token = _current.set((*_current.get(), self))
        try:
            return call()
        finally:
            _current.reset(token)

    def cancel(self) -> None:
        """The call's wait ends, and no further one begins. Any thread, any number of times."""
        with self._lock:
            self._cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    @contextlib.contextmanager
    def waiting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._check()
            self._interrupt = interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None
                self._check()  # what was interrupted is of no more use, also if an answer came

    def _check(self) -> None:
        if self._cancelled:
            raise InferenceError(0, "the request was cancelled")


_current: ContextVar[tuple[CancelScope, ...]] = ContextVar("cancel_scopes", default=())
_NEVER = contextlib.nullcontext()


def cancellable(interrupt: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """A wait that `interrupt` makes fail; it must do no more than that, and not raise.

    The context raises InferenceError if a scope of the thread is or was cancelled. What was waited
    on must then not be used again.
    """
    scopes = _current.get()
    if not scopes:
        return _NEVER
    return scopes[0].waiting(interrupt) if len(scopes) == 1 else _waiting(scopes, interrupt)


@contextlib.contextmanager
def _waiting(scopes: tuple[CancelScope, ...], interrupt: Callable[[], None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.waiting(interrupt))
        yield


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """What is done for the client as a whole, such as giving memory back: no call's cancellation
    interrupts it."""
    token = _current.set(())
    try:
        yield
    finally:
        _current.reset(token)
