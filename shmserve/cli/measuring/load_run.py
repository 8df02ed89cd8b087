"""Run of a load: concurrent callers send requests, one after another or at planned moments, and a
measurement takes in the times."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from shmserve.cli.measuring.door import Door, FailedRequest
from shmserve.cli.measuring.measurement import Measurement
from shmserve.cli.measuring.turns import Turns
from shmserve.cli.measuring.wire_door import WireDoor
from shmserve.cli.measuring.wire_loop import WireLoop
from shmserve.errors import ShmserveError

_WARM_UP = 5  # requests of a door that open connections, map memory and learn output sizes
Clock = Callable[[], float]


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
        before, used = time.perf_counter(), time.process_time()
        wires = [door for door in doors if isinstance(door, WireDoor)]
        if wires:
            WireLoop(measurement, wires, turns, clock).run()
        else:
            _run_threads(measurement, doors, turns, clock)
        measurement.unsent = turns.unsent()
        used, elapsed = time.process_time() - used, time.perf_counter() - before
        measurement.finish(clock(), used / elapsed)


def _run_threads(
    measurement: Measurement, doors: Sequence[Door], turns: Turns, clock: Clock
) -> None:
    callers = [
        threading.Thread(target=_call, args=(measurement, door, turns, clock)) for door in doors
    ]
    for caller in callers:
        caller.start()
    try:
        for caller in callers:
            caller.join()
    finally:
        turns.end()


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
