"""Thread pools with a bound. What is beyond it is refused at once, on a thread for refusals.

gRPC's own limit counts calls of every kind together, so that inferences could keep out the
health checks that are to say so. Here each kind has a pool of its own, and in it no caller, and
no model, gets more than its share of the threads and places.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from msgspec import Struct

from shmserve.errors import QueueFull, ResourceExhausted
from shmserve.frontends.grpc.silent_calls import SilentCalls
from shmserve.observe import flight_recorder

T = TypeVar("T")

_log = logging.getLogger(__name__)

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


def _exhausted(why: str) -> ResourceExhausted:
    flight_recorder.record("limit reached", "gRPC calls", why)
    return ResourceExhausted(why)


class PoolSize(Struct, frozen=True):
    """What a pool may hold.

    Attributes:
        threads: calls that run at a time.
        limit: calls that run or wait.
        share: the part of either that one caller, an address, may have.
        subject_share: the part of the threads that calls of one subject, a model, may have.
        subject_limit: calls of one subject that run or wait for a thread.
        grace_s: how long a call may be silent while others want what it has.
        silent_hold_threads: what silent calls have is a thread, not only a place.
    """

    threads: int
    limit: int
    share: float = 1.0
    grace_s: float = math.inf
    silent_hold_threads: bool = True
    subject_share: float = 1.0
    subject_limit: int = 1 << 30


class PoolPlace(Struct, eq=False):
    """A call's place in its pool. `uses`: the parties that have not left it yet."""

    address: str
    uses: int = 1


class ThreadTurn(Struct, eq=False):
    """One call that waits for a thread, or has it. `line`: its connection, of which there is one
    turn for each subject, since a call that may not run holds up those behind it. `subject`:
    the model that it names; empty: none that is known."""

    line: Hashable
    place: PoolPlace
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: Future[Any] | None = None
    subject: bytes = b""


class BoundedPool(ThreadPoolExecutor):
    """At most `size.threads` calls run and `size.limit` have a place; `why` tells the others.

    An engine that receives messages without threads asks for a `place` first and queues its call
    later; `submit` does both. `grpcio` insists on the type; the threads are our own, since the
    executor's futures and queues cost more than many a call.

    Attributes:
        count: places that are taken.
        silent_hold_threads: as its size says.
        silent: those calls whose client is to send something.
    """

    def __init__(self, name: str, size: PoolSize, refusals: Refusals, why: str) -> None:
        super().__init__(size.threads, thread_name_prefix=name)
        self._name = name
        self._size = size
        self._caller_threads = math.ceil(size.threads * size.share)
        self._caller_limit = math.ceil(size.limit * size.share)
        self._subject_threads = math.ceil(size.threads * size.subject_share)
        self._refusals = refusals
        self._why = why
        self.silent_hold_threads = size.silent_hold_threads
        self.silent = SilentCalls(size.grace_s)
        self._lock = threading.Lock()
        self.count = 0
        self._waiting: dict[Hashable, deque[ThreadTurn]] = {}  # by line, whose turn is next first
        self._running: Counter[str] = Counter()  # by address
        self._held: Counter[str] = Counter()  # places by address
        self._running_of: Counter[bytes] = Counter()  # by subject
        self._queued_of: Counter[bytes] = Counter()  # that run or wait, by subject
        self._threads_started: list[threading.Thread] = []
        self._idle: list[SimpleQueue[ThreadTurn | None]] = []  # of threads, the latest last
        self._closed = False

    def place(self, address: str) -> PoolPlace:
        """A place, until every use of it has been left.

        Raises:
            ResourceExhausted: there is none, or this caller has its share.
        """
        with self._lock:
            if self._held[address] >= self._caller_limit:
                if not self._end_silent(1, address):
                    raise _exhausted(
                        f"{self._why}: this caller has its share of them (max_caller_share)"
                    )
            elif self.count >= self._size.limit and not self._end_silent(1):
                raise _exhausted(self._why)
            self.count += 1
            self._held[address] += 1
        return PoolPlace(address)

    def leave(self, place: PoolPlace, turn: ThreadTurn | None = None) -> bool:
        """One party does not need it any more. `turn`: what need not run, then; whether it had not
        begun, and never will."""
        with self._lock:
            self._leave(place)
            if turn is None or turn not in (line := self._waiting.get(turn.line, ())):
                return False
            assert isinstance(line, deque), "the turn is in it"
            line.remove(turn)
            _drop(self._queued_of, turn.subject)
            if not line:
                del self._waiting[turn.line]
            self._leave(place)
        return True

    def queue(self, turn: ThreadTurn) -> None:
        """Run it in its turn, which leaves its place afterwards; connections take turns, and no
        address or subject has more than its share.

        Raises:
            RuntimeError: the pool is closed.
            QueueFull: there are too many of its subject. It still has its place.
        """
        address, subject = turn.place.address, turn.subject
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            queued = self._queued_of.get(subject, 0)
            if subject and queued >= self._size.subject_limit:
                raise QueueFull(
                    f"model '{subject.decode(errors='replace')}' has {queued} requests that wait"
                    " or run already (max_model_requests)"
                )
            self._queued_of[subject] = queued + 1
            running, of_subject = self._running.get(address, 0), self._running_of.get(subject, 0)
            if running < self._caller_threads and of_subject < self._subject_threads:
                if self._idle:
                    self._running[address], self._running_of[subject] = running + 1, of_subject + 1
                    self._idle.pop().put(turn)
                    return
                if len(self._threads_started) < self._size.threads:
                    self._start_thread(turn)
                    self._running[address], self._running_of[subject] = running + 1, of_subject + 1
                    return
            line = self._waiting.get(turn.line)
            if line is None:
                line = self._waiting[turn.line] = deque()
            line.append(turn)

    def _start_thread(self, first: ThreadTurn) -> None:
        name = f"{self._name}_{len(self._threads_started)}"
        thread = threading.Thread(target=self._take_turns, args=(first,), name=name, daemon=True)
        thread.start()
        self._threads_started.append(thread)

    def submit(self, fn: Callable[..., T], /, *args: Any, **_: Any) -> Future[T]:
        """Run it, as the `grpcio` library wants a call to be run."""
        peer = _peer(args)
        try:
            place = self.place(peer.rpartition(":")[0])
        except ResourceExhausted as ex:
            return self._refusals.refuse(ex.message, fn, *args)
        future: Future[T] = Future()
        self.queue(ThreadTurn(peer, place, fn, args, future))
        return future

    @property
    def pressed(self) -> bool:
        """Whether calls wait for the threads of silent ones."""
        return bool(self.silent_hold_threads and self._waiting and len(self.silent))

    def end_silent(self) -> None:
        """End calls that are silent for too long, with regard to how many wait for a thread."""
        with self._lock:
            if not self.silent_hold_threads:
                self._end_silent(0)
                return
            waiting: Counter[str] = Counter()
            for line in self._waiting.values():
                waiting[line[0].place.address] += len(line)
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
            self._closed = True
            turns = [turn for line in self._waiting.values() for turn in line]
            self._waiting.clear()
            for idle in self._idle:
                idle.put(None)
            self._idle.clear()
        for turn in turns:
            if turn.future is not None:
                turn.future.cancel()
        for thread in self._threads_started if wait else ():
            thread.join()

    def _end_silent(self, wanted: int, address: str | None = None) -> bool:
        return self.silent.end_overdue(time.monotonic(), wanted, address) > 0

    def _take_turns(self, turn: ThreadTurn | None) -> None:
        """A thread's work: it goes on for as long as somebody waits who may have it."""
        mine: SimpleQueue[ThreadTurn | None] = SimpleQueue()
        while turn is not None:
            _run(turn)
            turn = self._next(turn, mine) or mine.get()

    def _next(self, done: ThreadTurn, mine: SimpleQueue[ThreadTurn | None]) -> ThreadTurn | None:
        """Who has waited; None: it comes, or the end does, in the thread's own queue."""
        with self._lock:
            _drop(self._running, done.place.address)
            _drop(self._running_of, done.subject)
            _drop(self._queued_of, done.subject)
            self._leave(done.place)
            for name, line in self._waiting.items():
                address, subject = line[0].place.address, line[0].subject
                if (
                    self._running.get(address, 0) < self._caller_threads
                    and self._running_of.get(subject, 0) < self._subject_threads
                ):
                    turn = line.popleft()
                    del self._waiting[name]
                    if line:
                        self._waiting[name] = line  # behind the others
                    self._running[address] += 1
                    self._running_of[subject] += 1
                    return turn
            if self._closed:
                mine.put(None)
            else:
                self._idle.append(mine)
        return None

    def _leave(self, place: PoolPlace) -> None:
        place.uses -= 1
        if not place.uses:
            self.count -= 1
            _drop(self._held, place.address)


def _run(turn: ThreadTurn) -> None:
    future = turn.future
    if future is None:
        try:
            turn.fn(*turn.args)
        except BaseException:
            _log.exception("unexpected error in a call")
    elif future.set_running_or_notify_cancel():
        try:
            result = turn.fn(*turn.args)
        except BaseException as ex:
            future.set_exception(ex)
        else:
            future.set_result(result)


def _drop(counts: Counter[Any], key: Hashable) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


def _peer(args: tuple[Any, ...]) -> str:
    """Whose call it is: `grpcio` hands a pool the function that answers and the call's event."""
    call = getattr(args[1], "call", None) if len(args) > 1 else None
    return call.peer().decode() if call is not None else ""
