"""Calls whose client is to send something and has not: the silent ones of one pool.

Each holds a place, and with `grpcio` a thread. Whoever is silent for too long is ended anyway;
while others want what it holds, whoever has been silent the longest gives way much sooner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class EndableCall(Protocol):
    """A call as this book needs it; its attribute as `RpcContext` has it."""

    @property
    def client_number(self) -> int: ...

    def peer(self) -> str: ...

    def cancel(self) -> None: ...


class SilentCalls:
    """The book. `grace_s`: how long a call may be silent although others want its thread.

    Attributes:
        began: called by `stir`, for whom that is to wake; None: nobody.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._calls: dict[EndableCall, tuple[float, float]] = {}  # since when, until; oldest first
        self.began: Callable[[], None] | None = None
        self._ending: set[EndableCall] = set()  # cancelled, and still in their threads

    def __len__(self) -> int:
        return len(self._calls)

    def wait(self, call: EndableCall, limit_s: float) -> None:
        """From now on its client is to send, within `limit_s`."""
        now = time.monotonic()
        self._calls.pop(call, None)  # the latest are last
        self._calls[call] = (now, now + limit_s)
        self.stir()

    def stir(self) -> None:
        """There is something to be looked at from now on."""
        if self.began is not None:
            self.began()

    def heard(self, call: EndableCall) -> None:
        """It has sent, or the call has ended."""
        self._calls.pop(call, None)
        self._ending.discard(call)

    def end_overdue(self, now: float, wanted: int, caller: int | None = None) -> int:
        """End those that are beyond their limit, and of those beyond the grace so many that
        `wanted` threads become free; returns how many have been ended. `caller`: of
        this one only."""
        ended = 0
        wanted -= len(self._ending)
        for call, (since, until) in list(self._calls.items()):
            if now < until and (ended >= wanted or now - since < self._grace_s):
                continue
            if caller is not None and call.client_number != caller:
                continue
            self._ending.add(call)  # first: whoever is `heard` meanwhile takes it out of both
            if self._calls.pop(call, None) is None:
                self._ending.discard(call)
                continue
            _log.info("ended a call: %s sent nothing for %.1f s", call.peer(), now - since)
            call.cancel()
            ended += 1
        return ended


class AwaitedRequests(Iterator[Any]):
    """The messages of a stream. While one is waited for and nothing is worked on, it is silent."""

    def __init__(
        self, requests: Iterator[Any], call: EndableCall, silent: SilentCalls, limit_s: float
    ) -> None:
        self._requests = requests
        self._call = call
        self._silent = silent
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._waits = False
        self._working = 0

    def __next__(self) -> Any:
        self._change(waits=True)
        try:
            return next(self._requests)
        finally:
            self._change(waits=False)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Requests that came before are worked on, while the next is waited for."""
        self._change(work=1)
        try:
            yield
        finally:
            self._change(work=-1)

    def _change(self, waits: bool | None = None, work: int = 0) -> None:
        with self._lock:
            self._waits = self._waits if waits is None else waits
            self._working += work
            if self._waits and not self._working:
                self._silent.wait(self._call, self._limit_s)
            else:
                self._silent.heard(self._call)
