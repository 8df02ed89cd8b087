"""Loop of a load over wire doors: one thread drives all callers."""

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from shmserve.cli.measuring.door import WAIT_S, FailedRequest
from shmserve.cli.measuring.measurement import Measurement
from shmserve.cli.measuring.turns import Turns
from shmserve.cli.measuring.wire_door import Steps, WireDoor

Clock = Callable[[], float]
_LOOK_S = 0.5  # between two looks for late answers
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
# Edges cost no call per request. Doors take all that has come before they wait for the next edge.
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class WireCaller:
    """Caller with at most one request under way. `steps`: the request; None: none is. `begun`: its
    start."""

    def __init__(self, door: WireDoor, clock: Clock) -> None:
        self.door, self._clock = door, clock
        self.steps: Steps | None = None
        self.registered: socket.socket | None = None
        self.due = self.begun = 0.0
        self._answers: list[tuple[float, int]] = []

    def begin(self, due: float) -> None:
        self._answers = []
        self.due, self.begun = due, self._clock()
        self.steps = self.door.steps(self._note)

    def advance(self, measurement: Measurement) -> bool:
        """Go on with the request. Return True if the request ended."""
        assert self.steps is not None
        try:
            next(self.steps)
            return False
        except StopIteration:
            if self.due >= 0:
                self._answers.append((self._clock(), 0))
                measurement.add(self.due, self.begun, self._answers)
        except FailedRequest as ex:
            self._fail(measurement, ex)
        self.steps = None
        return True

    def give_up(self, measurement: Measurement) -> None:
        """End a request whose answer is late."""
        assert self.steps is not None
        try:
            self.door.give_up(self.steps)
        except FailedRequest as ex:
            self._fail(measurement, ex)
        self.steps = None

    def _fail(self, measurement: Measurement, error: FailedRequest) -> None:
        if self.due >= 0:
            measurement.fail(error, (self.begun - self.due) * 1e3)

    def _note(self, nbytes: int) -> None:
        self._answers.append((self._clock(), nbytes))


class WireLoop:
    """Loop that gives the turns to free callers, until the turns are over and all requests have
    ended."""

    def __init__(
        self, measurement: Measurement, doors: Sequence[WireDoor], turns: Turns, clock: Clock
    ) -> None:
        self._measurement, self._turns, self._clock = measurement, turns, clock
        self._callers = [WireCaller(door, clock) for door in doors]
        self._free = deque(self._callers)
        self._by_fd: dict[int, WireCaller] = {}
        self._next_due: float | None = None
        self._over = False
        self._next_look = clock() + _LOOK_S

    def run(self) -> None:
        with select.epoll() as poll:
            for caller in self._callers:
                self._watch(caller, poll)
            while not self._over or len(self._free) < len(self._callers):
                for fd, events in self._wait(poll):
                    self._go_on(self._by_fd[fd], poll, bool(events & _ENDS))
                self._start(poll)
                if self._clock() >= self._next_look:
                    self._end_late()

    def _wait(self, poll: select.epoll) -> list[tuple[int, int]]:
        """Return events, at the latest when a request should start."""
        until = self._next_look
        if self._free and not self._over:
            if self._next_due is None:  # callers that failed at once: let the others go on first
                return poll.poll(0)
            if self._next_due < until:
                # epoll would wait for whole milliseconds, and requests would start late
                select.select([poll], (), (), max(0.0, self._next_due - self._clock()))
                return poll.poll(0)
        return poll.poll(max(0.0, until - self._clock()))

    def _start(self, poll: select.epoll) -> None:
        """Give turns that are due to free callers, one to each."""
        for _ in range(len(self._free)):
            if self._over:
                return
            if self._next_due is None:
                self._next_due = self._turns.take(self._clock())
            if self._next_due is None:
                self._over = True
            elif self._next_due > self._clock():
                return
            else:
                caller = self._free.popleft()
                caller.begin(self._next_due)
                self._next_due = None
                self._advance(caller, poll)

    def _go_on(self, caller: WireCaller, poll: select.epoll, is_ending: bool) -> None:
        caller.door.is_ending |= is_ending
        was_idle = caller.steps is None
        if not was_idle:
            self._advance(caller, poll)
        if was_idle or (is_ending and caller.steps is None):
            caller.door.woken()

    def _advance(self, caller: WireCaller, poll: select.epoll) -> None:
        if caller.advance(self._measurement):
            self._free.append(caller)
        self._watch(caller, poll)

    def _watch(self, caller: WireCaller, poll: select.epoll) -> None:
        """Get the events of the caller's connection, also while no request is under way."""
        sock = caller.door.socket
        if sock is not None and sock is not caller.registered:
            caller.registered = sock
            self._by_fd[sock.fileno()] = caller
            poll.register(sock, _EVENTS)

    def _end_late(self) -> None:
        now = self._clock()
        self._next_look = now + _LOOK_S
        for caller in self._callers:
            if caller.steps is not None and now - caller.begun > WAIT_S:
                caller.give_up(self._measurement)
                self._free.append(caller)
