"""Run of a load: concurrent callers send requests, one after another or at planned moments, and a
measurement takes in the times."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from shmserve.cli.measuring.door import Door, FailedRequest
from shmserve.cli.measuring.measurement import Measurement
from shmserve.errors import ShmserveError

_WARM_UP = 5  # requests of a door that open connections, map memory and learn output sizes
Clock = Callable[[], float]


class Turns:
    """Distributor of a run's requests to the callers. Thread-safe.

    Args:
        planned: moments at which requests should start, in seconds from the start of the measured
            time; None: at once, whenever a caller is free.
        seconds: length of the measured time.
        requests: largest number of requests that start in the measured time.
    """

    def __init__(self, planned: Iterator[float] | None, seconds: float, requests: int) -> None:
        self._planned, self._seconds, self._left = planned, seconds, requests
        self._lock = threading.Lock()

    def take(self, now: float) -> float | None:
        """Return the moment at which the caller's next request should start, negative during the
        warm-up; None: the run is over."""
        with self._lock:
            if now > self._seconds or not self._left:
                return None
            due = now if self._planned is None else next(self._planned)
            if due > self._seconds:
                return None
            self._left -= due >= 0
            return due

    def unsent(self) -> int:
        """Return the number of planned requests that will not start, once the run is over."""
        rest = itertools.islice(self._planned or (), self._left)
        return sum(1 for _ in itertools.takewhile(self._seconds.__ge__, rest))

    def end(self) -> None:
        """Give no further turn."""
        with self._lock:
            self._left = 0


def run(
    measurement: Measurement,
    make: Callable[[], Door],
    planned: Iterator[float] | None,
    seconds: float,
    requests: int,
    warm_up_s: float,
) -> None:
    """Run `measurement.concurrency` callers, each with a separate door, for `seconds` or
    `requests`, after `warm_up_s` seconds of the same load, not measured. Raise
    ShmserveError if a door cannot be opened, or all its first requests fail."""
    with ExitStack() as stack:
        doors = [stack.enter_context(make()) for _ in range(measurement.concurrency)]
        for door in doors:
            _warm_up(measurement, door)
        start = time.perf_counter() + warm_up_s
        turns = Turns(planned, seconds, requests)
        clock = functools.partial(_seconds_since, start)
        callers = [
            threading.Thread(target=_call, args=(measurement, door, turns, clock)) for door in doors
        ]
        for caller in callers:
            caller.start()
        try:
            for caller in callers:
                caller.join()
            measurement.unsent = turns.unsent()
        finally:
            turns.end()
        measurement.finish(clock())


def _seconds_since(start: float) -> float:
    return time.perf_counter() - start


def _warm_up(measurement: Measurement, door: Door) -> None:
    """Send the first requests. Raise FailedRequest if all fail."""
    failures = []
    for _ in range(_WARM_UP):
        try:
            measurement.warm_up(door.send(lambda _: None, receipt=True))
        except FailedRequest as ex:
            failures.append(ex)
    if len(failures) == _WARM_UP:
        raise failures[-1]


def _call(measurement: Measurement, door: Door, turns: Turns, clock: Clock) -> None:
    """Send requests in turn. The latency of a request counts from the planned start."""
    while (due := turns.take(clock())) is not None:
        pause = due - clock()
        if pause > 0:
            time.sleep(pause)
        answers: list[tuple[float, int]] = []
        begun = clock()
        try:
            door.send(functools.partial(_note, answers, clock))
        except ShmserveError as ex:
            if due >= 0:
                measurement.fail(ex, (begun - due) * 1e3)
            continue
        if due >= 0:
            measurement.add(due, begun, [*answers, (clock(), 0)])


def _note(answers: list[tuple[float, int]], clock: Clock, nbytes: int) -> None:
    answers.append((clock(), nbytes))
