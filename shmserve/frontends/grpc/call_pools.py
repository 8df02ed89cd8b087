"""Pools of calls, and limits on waiting for clients.

Each kind of call has its own places, so inferences cannot keep out the health checks that report
on inferences. A call beyond the limits of its kind is refused at once.

A call waits for its client to send a message or to take the answer. HTTP/2 alone would wait
forever, and the call would keep its place or the answer's memory. Few clients set deadlines. So a
call beyond its limit is cancelled. While other calls want a place, the call that has been silent
the longest gives way much earlier.

All objects of this module belong to the loop's thread.

Callers, and the connections of each caller, take turns to run. Bounds for each caller:
`max_caller_share` of the running calls and of the places. Bounds for each model: `max_model_share`
of the running calls, and `max_model_requests` calls. The engine reads the model's name at the
front of a ModelInferRequest. A place belongs to the call and to its turn, and is free when both
have ended. So answers under way are bounded by `grpc_max_calls`, too. Turns matter most in
executors, which serve all frontends: `Execute.caller_number` identifies the caller there
(`core.caller`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from shmserve.config import Settings
from shmserve.core.scheduling.admission import Admission, AdmissionLimits, CallPlace, Full
from shmserve.errors import ResourceExhausted
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.observe import flight_recorder

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_SMALL_CALLS = 1024  # limit of calls of each: `health`, `quick`, `asking`
SMALL_RUNNING = 64  # limit of running calls of each: `health`, `quick`, `asking`
_LOADING_CALLS = 64
_LOADING_RUNNING = 16  # each call keeps the files of its message in memory
_REFLECTIONS = 16
MAX_WATCHERS = 64
SILENCE_S = 10.0  # silence before an inference or a load gives way to other calls
SMALL_SILENCE_S = 0.25  # silence before any other unary call gives way
STREAM_SILENCE_S = 60.0  # silence before a stream without work gives way
_BUSY = "too many calls at a time"


class SilentCalls:
    """The silent calls of one pool: calls that wait for a message of their client. `grace_s`:
    silence, in seconds, after which a call gives way to a call that wants its place. `clock`:
    checks the calls once a second."""

    def __init__(self, grace_s: float, clock: ClientDeadlines) -> None:
        self._grace_s = grace_s
        self._clock = clock
        # call -> when the silence began, when it must end; the longest silent call first
        self._calls: dict[RpcContext, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def wait(self, call: RpcContext, limit_s: float) -> None:
        """Expect a message of this call's client within `limit_s` seconds."""
        now = time.monotonic()
        self._calls.pop(call, None)  # the latest silence is the last entry
        self._calls[call] = (now, now + limit_s)
        if not self._clock.ticking:
            self._clock.tick_soon()

    def heard(self, call: RpcContext) -> None:
        """Stop expecting a message: the client has sent, or the call has ended."""
        self._calls.pop(call, None)

    def end_overdue(self, now: float) -> None:
        """End the calls whose clients have been silent for longer than their limit."""
        for call, (since, until) in list(self._calls.items()):
            if now >= until:
                self._end(call, now - since)

    def make_room(self, now: float, caller: int | None = None) -> bool:
        """End the call that has been silent the longest (of `caller`, if given). Return False if no
        call has been silent for the grace period."""
        for call, (since, until) in self._calls.items():
            if caller is not None and call.client_number != caller:
                continue
            if now - since < self._grace_s and now < until:
                return False
            self._end(call, now - since)
            return True
        return False

    def _end(self, call: RpcContext, silence_s: float) -> None:
        self._calls.pop(call, None)
        _log.info("ended a call: %s sent nothing for %.1f s", call.peer(), silence_s)
        call.give_up()


class AwaitedRequests(Iterator[Any]):
    """The messages of a stream. The stream counts as silent while waiting for a message without
    working on earlier messages."""

    def __init__(
        self, requests: Iterator[Any], call: RpcContext, silent: SilentCalls, limit_s: float
    ) -> None:
        self._requests = requests
        self._call = call
        self._silent = silent
        self._limit_s = limit_s
        self._waits = False
        self._working = 0

    def __next__(self) -> Any:
        self._waits = True
        self._look()
        try:
            return next(self._requests)
        finally:
            self._waits = False
            self._look()

    def first(self, limit_s: float) -> Any:
        """Return the first message, which the client must send within `limit_s` seconds. Return
        None if the client ends the stream without a message."""
        kept, self._limit_s = self._limit_s, limit_s
        try:
            return next(self, None)
        finally:
            self._limit_s = kept

    def on_message(self, callback: Callable[[], object] | None) -> bool:
        """Have the loop call `callback` as `RpcContext.on_message` does."""
        return self._call.on_message(callback)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on earlier requests, perhaps while the stream waits for the next request."""
        self.work(1)
        try:
            yield
        finally:
            self.work(-1)

    def work(self, by: int) -> None:
        """Add `by` to the number of earlier requests under way."""
        self._working += by
        self._look()

    def _look(self) -> None:
        if self._waits and not self._working:
            self._silent.wait(self._call, self._limit_s)
        else:
            self._silent.heard(self._call)


class ClientDeadlines:
    """Deadlines of clients, checked once a second while there are deadlines. `at`: has the loop
    call a function at a time of the monotonic clock. `ticking`: True if the next check is
    scheduled."""

    def __init__(self, at: Callable[[float, Callable[[], object]], None]) -> None:
        self._at = at
        self._due: dict[RpcContext, float] = {}
        self._silent: list[SilentCalls] = []
        self.ticking = False

    def silent_calls(self, grace_s: float) -> SilentCalls:
        """Make the list of a pool's silent calls, whose deadlines are checked here."""
        silent = SilentCalls(grace_s, self)
        self._silent.append(silent)
        return silent

    def __len__(self) -> int:
        return len(self._due)

    def expect(self, context: RpcContext, seconds: float) -> None:
        """Cancel the call unless `met` is called within `seconds`."""
        self._due[context] = time.monotonic() + seconds
        if not self.ticking:
            self.tick_soon()

    def met(self, context: RpcContext) -> None:
        """Forget the call's deadline: the client did what was expected, or the call has ended."""
        self._due.pop(context, None)

    def expect_taken(self, context: RpcContext, seconds: float) -> None:
        """Cancel the call unless the socket takes the whole answer, which ends the call, within
        `seconds`."""
        self.expect(context, seconds)
        if not context.add_callback(partial(self._due.pop, context, None)):
            self.met(context)

    def tick_soon(self) -> None:
        """Check all deadlines in a second."""
        self.ticking = True
        self._at(time.monotonic() + _TICK_S, self._tick)

    def _tick(self) -> None:
        self.ticking = False
        now = time.monotonic()
        for silent in self._silent:
            silent.end_overdue(now)
        for context, due in list(self._due.items()):
            if now >= due:
                self.met(context)
                _log.info("cancelled a call: it waited too long for %s", context.peer())
                context.give_up()
        if self._due or any(map(len, self._silent)):
            self.tick_soon()


class CallPool:
    """The calls of one kind. `full`: error text for a client that gets no place. `admission`:
    places and turns. `silent`: calls that wait for a message of their client."""

    def __init__(self, limits: AdmissionLimits, silent: SilentCalls, full: str = _BUSY) -> None:
        self.admission = Admission(limits)
        self.silent = silent
        self._full = full

    @property
    def count(self) -> int:
        """The number of taken places."""
        return self.admission.count

    def place(self, caller: int) -> CallPlace:
        """Take a place for a call of this caller, from a silent call if necessary. Raise
        ResourceExhausted if no place is free, or the caller has its share."""
        full = self.admission.full(caller)
        if full is not None:
            of_caller = caller if full is Full.SHARE else None
            if not self.silent.make_room(time.monotonic(), of_caller):
                share = ": this caller has its share of them (max_caller_share)"
                reason = f"{self._full}{share if full is Full.SHARE else ''}"
                flight_recorder.record("limit reached", "gRPC calls", reason)
                raise ResourceExhausted(reason)
        return self.admission.enter(caller)


class CallPools:
    """The pools of a server.

    Attributes:
        inferences, streams, watchers, health: calls of these kinds.
        quick: calls that the registry answers.
        asking: calls that the coordinator answers.
        loading: calls that wait for models to be loaded.
        reflections: calls that ask for descriptors.
    """

    def __init__(self, settings: Settings, deadlines: ClientDeadlines) -> None:
        share, small_s = settings.max_caller_share, SMALL_SILENCE_S
        silent = deadlines.silent_calls
        calls = settings.grpc_max_calls
        self.inferences = CallPool(
            AdmissionLimits(
                calls,
                settings.grpc_threads,
                share,
                settings.max_model_share,
                settings.max_model_requests,
            ),
            silent(SILENCE_S),
            f"{calls} inferences run or wait already (grpc_max_calls)",
        )
        streams = settings.grpc_max_streams
        self.streams = CallPool(
            AdmissionLimits(streams, caller_share=share),
            silent(STREAM_SILENCE_S),
            f"{streams} streams are open already (grpc_max_streams)",
        )
        self.watchers = CallPool(
            AdmissionLimits(MAX_WATCHERS, caller_share=share),
            silent(small_s),
            f"{MAX_WATCHERS} watchers of health are open already",
        )
        small = AdmissionLimits(_SMALL_CALLS, SMALL_RUNNING, share)
        self.health = CallPool(small, silent(small_s))
        self.quick = CallPool(small, silent(small_s))
        self.asking = CallPool(small, silent(small_s))
        loading = AdmissionLimits(_LOADING_CALLS, _LOADING_RUNNING, share)
        self.loading = CallPool(loading, silent(SILENCE_S))
        reflections = AdmissionLimits(_REFLECTIONS, caller_share=share)
        self.reflections = CallPool(reflections, silent(small_s))
