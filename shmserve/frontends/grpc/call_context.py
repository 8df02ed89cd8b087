"""The client of one gRPC call: who it is, how long it waits, and what ends with it."""

from __future__ import annotations

import threading

import grpc

from shmserve.core.regions.region_book import Caller
from shmserve.errors import DeadlineExceeded
from shmserve.frontends.grpc.callers import Callers
from shmserve.frontends.oip.seam import Call


class Asker:
    """See the module. One per call of gRPC's, however many requests a stream has."""

    def __init__(self, context: grpc.ServicerContext, callers: Callers) -> None:
        self.context = context
        self._callers = callers
        self._caller: Caller | None = None
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._gone = not context.add_callback(self._end)

    def caller(self) -> Caller:
        """Who it is, looked up when first asked."""
        if self._caller is None:
            self._caller = self._callers.of(self.context)
        return self._caller

    def timeout(self, most_s: float) -> float:
        """How long it waits, but at most so long.

        Raises:
            DeadlineExceeded: no longer.
        """
        remaining: float = self.context.time_remaining()
        if remaining <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return min(remaining, most_s)

    def wants(self, key: str, value: str) -> bool:
        """Whether its metadata say so."""
        return (key, value) in self.context.invocation_metadata()

    def attach(self, call: Call) -> None:
        """This request is cancelled when the client goes, until it is detached."""
        with self._lock:
            self._calls.add(call)
            gone = self._gone
        if gone:
            call.cancel()

    def detach(self, call: Call) -> None:
        with self._lock:
            self._calls.discard(call)

    def _end(self) -> None:
        with self._lock:
            self._gone = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
