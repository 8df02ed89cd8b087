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
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from shmserve.errors import STOPPING, QueueFull, ResourceExhausted, Unavailable
from shmserve.frontends import caller_numbers
from shmserve.frontends.grpc.call_turns import CallTurn, PoolPlace, PoolSize
from shmserve.frontends.grpc.silent_calls import SilentCalls
from shmserve.frontends.grpc.waiting_turns import WaitingTurns
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


class BoundedPool(ThreadPoolExecutor):
    """At most `size.threads` calls run and `size.limit` have a place; `why` tells the others.

    An engine that receives messages without threads asks for a `place` first and queues its call
    later; `submit` does both. `grpcio` insists on the type; the threads are our own, since the
    executor's futures and queues cost more than many a call.

    Attributes:
        count: places that are taken.
        silent_hold_threads: as its size says.
        silent: those calls whose client is to send something.
        starved: calls wait because the system had no thread.
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
        self._waiting = WaitingTurns()
        self._running: Counter[int] = Counter()  # by caller
        self._active = 0  # of all callers
        self._held: Counter[int] = Counter()  # places by caller
        self._subjects: dict[bytes, list[int]] = {}  # how many run, and how many run or wait
        self._threads_started: list[threading.Thread] = []
        self._idle: list[SimpleQueue[CallTurn | None]] = []  # of threads, the latest last
        self._closed = False
        self.starved = False

    def place(self, caller: int) -> PoolPlace:
        """A place, until every use of it has been left.

        Raises:
            ResourceExhausted: there is none, or this caller has its share.
        """
        with self._lock:
            held = self._held.get(caller, 0)
            if held >= self._caller_limit:
                if not self._end_silent(1, caller):
                    raise _exhausted(
                        f"{self._why}: this caller has its share of them (max_caller_share)"
                    )
            elif self.count >= self._size.limit and not self._end_silent(1):
                raise _exhausted(self._why)
            self.count += 1
            self._held[caller] = held + 1
        return PoolPlace(caller)

    def leave(self, place: PoolPlace, turn: CallTurn | None = None) -> bool:
        """One party does not need it any more. `turn`: what need not run, then; whether it had not
        begun, and never will."""
        with self._lock:
            self._leave(place)
            waiting = self._waiting
            if turn is None or not waiting.by_caller or not waiting.remove(turn):
                return False
            self._subject_left(turn.subject)
            self._leave(place)
        return True

    def queue(self, turn: CallTurn) -> bool:
        """Run it in its turn, which leaves its place afterwards; callers take turns, and so do
        the connections of each. No caller or subject has more than its share.
        True: it is the loop's, which is to `run` it now.

        Raises:
            Unavailable: the pool is closed, or the system has no thread. It still has its place.
            QueueFull: the same, of too many of its subject.
        """
        subject = turn.subject
        with self._lock:
            if self._closed:
                raise Unavailable(STOPPING)
            counts = self._subjects.get(subject) or [0, 0]
            if subject and counts[1] >= self._size.subject_limit:
                raise QueueFull(
                    f"model '{subject.decode(errors='replace')}' has {counts[1]} requests that wait"
                    " or run already (max_model_requests)"
                )
            caller = turn.place.caller
            running = self._running.get(caller, 0)
            waits = (
                running >= self._caller_threads
                or counts[0] >= self._subject_threads
                or self._active >= self._size.threads
            )
            if waits:
                self._waiting.add(turn)
            else:
                if turn.post is None and not self._give_thread(turn):
                    raise Unavailable("the server has no thread for the call now")
                self._active += 1
                self._running[caller] = running + 1
                counts[0] += 1
            counts[1] += 1
            self._subjects[subject] = counts
        return not waits and turn.post is not None

    def run(self, turn: CallTurn) -> None:
        """Run a turn of the loop's, and have whoever waits for its place run, too."""
        try:
            turn.fn(*turn.args)
        except Exception:
            _log.exception("unexpected error in a call")
        with self._lock:
            following = self._ended(turn)
        if following:
            self._post(following)

    def _post(self, turns: list[CallTurn]) -> None:
        for turn in turns:
            assert turn.post is not None, "it is the loop's"
            turn.post(partial(self.run, turn))

    def _give_thread(self, turn: CallTurn) -> bool:
        """One that has nothing to do, or a new one; False: the system has none. There are as many
        as may run."""
        if self._idle:
            self._idle.pop().put(turn)
            return True
        name = f"{self._name}_{len(self._threads_started)}"
        thread = threading.Thread(target=self._take_turns, args=(turn,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _log.warning("the system has no thread for a call")
            return False
        self._threads_started.append(thread)
        return True

    def _may_run(self, turn: CallTurn) -> bool:
        """Whether neither its caller nor its subject has its share of the threads."""
        running = self._running.get(turn.place.caller, 0)
        of_subject = self._subjects[turn.subject][0]
        return running < self._caller_threads and of_subject < self._subject_threads

    def submit(self, fn: Callable[..., T], /, *args: Any, **_: Any) -> Future[T]:
        """Run it, as the `grpcio` library wants a call to be run."""
        peer = _peer(args)
        try:
            place = self.place(caller_numbers.of_peer(peer))
        except ResourceExhausted as ex:
            return self._refusals.refuse(ex.message, fn, *args)
        future: Future[T] = Future()
        try:
            self.queue(CallTurn(peer, place, fn, args, future))
        except Unavailable as ex:
            self.leave(place)
            return self._refusals.refuse(ex.message, fn, *args)
        return future

    @property
    def pressed(self) -> bool:
        """Whether calls wait for the threads of silent ones."""
        return bool(self.silent_hold_threads and self._waiting.by_caller and len(self.silent))

    def look(self) -> None:
        """From time to time, where `pressed` often: end calls that are silent for too long, with
        regard to how many wait for a thread; try again to start what had none."""
        with self._lock:
            self._end_all_silent()
            following = self._start_waiting() if self.starved else []
        self._post(following)

    def _end_all_silent(self) -> None:
        if not self.silent_hold_threads:
            self._end_silent(0)
            return
        wanted = self._active - self._size.threads  # less what is idle
        for caller in self._waiting.by_caller:
            count = self._waiting.count(caller)
            room = self._caller_threads - self._running[caller]
            wanted += min(count, room)
            if count > room:  # whoever has its share waits for calls of its own
                self._end_silent(count - room, caller)
        self._end_silent(wanted)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        with self._lock:
            self._closed = True
            turns = list(self._waiting)
            self._waiting = WaitingTurns()
            for idle in self._idle:
                idle.put(None)
            self._idle.clear()
        for turn in turns:
            if turn.future is not None:
                turn.future.cancel()
        for thread in self._threads_started if wait else ():
            thread.join()

    def _end_silent(self, wanted: int, caller: int | None = None) -> bool:
        return self.silent.end_overdue(time.monotonic(), wanted, caller) > 0

    def _take_turns(self, turn: CallTurn | None) -> None:
        """A thread's work: it goes on for as long as somebody waits who may have it."""
        mine: SimpleQueue[CallTurn | None] = SimpleQueue()
        while turn is not None:
            _run(turn)
            with self._lock:
                if self._closed:
                    mine.put(None)
                else:
                    self._idle.append(mine)
                following = self._ended(turn)
            self._post(following)
            turn = mine.get()

    def _ended(self, done: CallTurn) -> list[CallTurn]:
        """Start what may run now and is for threads; the loop's is returned, for `_post`."""
        self._active -= 1
        _drop(self._running, done.place.caller)
        counts = self._subjects[done.subject]
        counts[0] -= 1
        counts[1] -= 1
        if not counts[1]:
            del self._subjects[done.subject]
        self._leave(done.place)
        return self._start_waiting() if self._waiting.by_caller else []

    def _start_waiting(self) -> list[CallTurn]:
        """Start what may run now, as `_ended` does."""
        self.starved = False
        following: list[CallTurn] = []
        waiting = self._waiting
        while waiting.by_caller and self._active < self._size.threads:
            turn = waiting.next(self._may_run)
            if turn is None:
                break
            if turn.post is not None:
                following.append(turn)
            elif not self._give_thread(turn):
                waiting.put_back(turn)  # until another call ends, or `look`
                self.starved = True
                self.silent.stir()
                break
            self._active += 1
            self._running[turn.place.caller] += 1
            self._subjects[turn.subject][0] += 1
        return following

    def _subject_left(self, subject: bytes) -> None:
        """A call of it has gone that waited."""
        counts = self._subjects[subject]
        counts[1] -= 1
        if not counts[1]:
            del self._subjects[subject]

    def _leave(self, place: PoolPlace) -> None:
        place.uses -= 1
        if not place.uses:
            self.count -= 1
            _drop(self._held, place.caller)


def _run(turn: CallTurn) -> None:
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
