"""Thread pools with a bound. What is beyond it is refused at once, on a thread for refusals.

gRPC's own limit counts calls of every kind together, so that inferences could keep out the
health checks that are to say so. Here each kind has a pool of its own, and in it no caller gets
more than its share of the threads and places.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import Struct

from shmserve.errors import ResourceExhausted
from shmserve.frontends.grpc.silent_calls import SilentCalls

T = TypeVar("T")

_local = threading.local()


class Refusals(ThreadPoolExecutor):
    """Runs what had no place elsewhere; `check_admitted` then raises."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="refusals")

    def refuse(self, why: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        return self.submit(_refused, why, fn, *args, **kwargs)


def _refused(why: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    _local.why = why
    try:
        return fn(*args, **kwargs)
    finally:
        _local.why = ""


def check_admitted() -> None:
    """To be called first by whatever runs in a pool.

    Raises:
        ResourceExhausted: it is here to be refused.
    """
    why = getattr(_local, "why", "")
    if why:
        raise ResourceExhausted(why)


class PoolSize(Struct, frozen=True):
    """What a pool may hold.

    Attributes:
        threads: calls that run at a time.
        limit: calls that run or wait.
        share: the part of either that one caller, an address, may have.
        grace_s: how long a call may keep its thread in silence while others wait for one.
    """

    threads: int
    limit: int
    share: float = 1.0
    grace_s: float = math.inf


class _Turn(Struct, eq=False):
    """One call that waits for a thread, or has it."""

    peer: str
    address: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: Future[Any]


class BoundedPool(ThreadPoolExecutor):
    """At most `size.threads` calls run and `size.limit` run or wait; `why` tells the others.

    Attributes:
        why: what those are told.
        count: calls that run, wait, or have a place reserved.
        silent: those of them whose client is to send something.
    """

    def __init__(self, name: str, size: PoolSize, refusals: Refusals, why: str) -> None:
        super().__init__(size.threads, thread_name_prefix=name)
        self._size = size
        self._caller_threads = math.ceil(size.threads * size.share)
        self._caller_limit = math.ceil(size.limit * size.share)
        self._refusals = refusals
        self.why = why
        self.silent = SilentCalls(size.grace_s)
        self._lock = threading.Lock()
        self.count = 0
        self._waiting: dict[str, deque[_Turn]] = {}  # by connection, whose turn is next first
        self._running: Counter[str] = Counter()  # by address
        self._held: Counter[str] = Counter()  # by address: running or waiting

    def reserve(self) -> bool:
        """A place for `submit_reserved` or `give_back`; False: there is none."""
        with self._lock:
            free = self.count < self._size.limit or self._end_silent(1)
            self.count += free
        return free

    def give_back(self) -> None:
        """The reserved place is not needed."""
        with self._lock:
            self.count -= 1

    def submit_reserved(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run it, in a place that was reserved."""
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self.give_back())
        return future

    def submit(self, fn: Callable[..., T], /, *args: Any, **_: Any) -> Future[T]:
        """Run it, as the `grpcio` library wants a call to be run: connections take turns, and no
        address has more than its share."""
        peer = _peer(args)
        address = peer.rpartition(":")[0]  # of all its connections
        with self._lock:
            why = ""
            if self._held[address] >= self._caller_limit:
                if not self._end_silent(1, address):
                    why = f"{self.why}: this caller has its share of them (max_caller_share)"
            elif self.count >= self._size.limit and not self._end_silent(1):
                why = self.why
            if not why:
                self.count += 1
                self._held[address] += 1
                turn = _Turn(peer, address, fn, args, Future())
                self._waiting.setdefault(peer, deque()).append(turn)
        if why:
            return self._refusals.refuse(why, fn, *args)
        super().submit(self._take_turns)
        return turn.future

    @property
    def pressed(self) -> bool:
        """Whether calls wait for the threads of silent ones."""
        return bool(self._waiting and len(self.silent))

    def end_silent(self) -> None:
        """End calls that are silent for too long, with regard to how many wait for a thread."""
        with self._lock:
            waiting: Counter[str] = Counter()
            for line in self._waiting.values():
                waiting[line[0].address] += len(line)
            wanted = self._running.total() - self._size.threads  # less what is idle
            for address, count in waiting.items():
                room = self._caller_threads - self._running[address]
                wanted += min(count, room)
                if count > room:  # whoever has its share waits for calls of its own
                    self._end_silent(count - room, address)
            self._end_silent(wanted)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        with self._lock:
            turns = [turn for line in self._waiting.values() for turn in line]
            self._waiting.clear()
        for turn in turns:
            turn.future.cancel()

    def _end_silent(self, wanted: int, address: str | None = None) -> bool:
        return self.silent.end_overdue(time.monotonic(), wanted, address) > 0

    def _take_turns(self) -> None:
        """A thread's work: it goes on for as long as somebody waits who may have it."""
        turn: _Turn | None = None
        while (turn := self._next(turn)) is not None:
            if turn.future.set_running_or_notify_cancel():
                try:
                    turn.future.set_result(turn.fn(*turn.args))
                except BaseException as ex:
                    turn.future.set_exception(ex)

    def _next(self, done: _Turn | None) -> _Turn | None:
        with self._lock:
            if done is not None:
                self.count -= 1
                for counts in (self._running, self._held):
                    counts[done.address] -= 1
                    if not counts[done.address]:
                        del counts[done.address]
            for peer, line in self._waiting.items():
                if self._running[line[0].address] < self._caller_threads:
                    turn = line.popleft()
                    del self._waiting[peer]
                    if line:
                        self._waiting[peer] = line  # behind the others
                    self._running[turn.address] += 1
                    return turn
        return None


def _peer(args: tuple[Any, ...]) -> str:
    """Whose call it is: `grpcio` hands a pool the function that answers and the call's event."""
    call = getattr(args[1], "call", None) if len(args) > 1 else None
    return call.peer().decode() if call is not None else ""
