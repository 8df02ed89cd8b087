"""Cancellation of a request by another thread than the waiting one.

A scope applies to the thread that runs under it, so functions that wait for the server need no
extra argument. Scopes nest, and any of them can end the wait. Each waiting function supplies an
interrupt that shuts down the client's own end. The server then sees a disconnected client and ends
the request too.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from shmserve.client.wire.inference_error import InferenceError

T = TypeVar("T")


class CancelScope:
    """Cancellation of one call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._cancelled = False

    def run(self, call: Callable[[], T]) -> T:
        """Run a call under this scope and return its result. Raise InferenceError if the scope was
        cancelled before the answer arrived."""
        self._check()
        token = _current.set((*_current.get(), self))
        try:
            return call()
        finally:
            _current.reset(token)

    def cancel(self) -> None:
        """End the call's current wait and prevent further waits. For any thread, idempotent."""
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
                self._check()  # an interrupted connection is unusable, even if an answer arrived

    def _check(self) -> None:
        if self._cancelled:
            raise InferenceError(0, "the request was cancelled")


_current: ContextVar[tuple[CancelScope, ...]] = ContextVar("cancel_scopes", default=())
_NEVER = contextlib.nullcontext()


def cancellable(interrupt: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Return a context for a wait that `interrupt` makes fail. `interrupt` must do nothing else
    and must not raise.

    The context raises InferenceError if a scope of the thread is or was cancelled. The connection
    waited on must then not be used again.
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
    """Protect work for the whole client, such as unregistering, from a call's cancellation."""
    token = _current.set(())
    try:
        yield
    finally:
        _current.reset(token)
