"""Admission: places for calls or connections of one kind, and turns to run. Pure: no clock, no
I/O.

A call takes a place when it begins and keeps the place until its last byte is with the client. At
most `AdmissionLimits.running` calls with places run at a time; further calls wait. Callers take
turns, and so do the lines of each caller (its connections). No caller has more than its share of
places or running calls. No subject (the model named by a call) has more than its share of running
calls.

All methods are called from one thread.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

from msgspec import Struct

from shmserve.errors import QueueFull


class AdmissionLimits(Struct, frozen=True):
    """Limits for one kind of calls.

    Attributes:
        places: number of calls that run or wait.
        running: number of calls that run at a time; None: all calls with places.
        caller_share: largest part of the places, and of the running calls, for one caller.
        subject_share: largest part of the running calls for one subject.
        subject_limit: number of running or waiting calls of one subject.
    """

    places: int
    running: int | None = None
    caller_share: float = 1.0
    subject_share: float = 1.0
    subject_limit: int = 1 << 30


class Full(Enum):
    """Reason for the lack of a place."""

    PLACES = "all places are taken"
    SHARE = "the caller has its share of the places"


class CallPlace(Struct, eq=False):
    """Place of one caller. `uses`: parties that have not left the place yet."""

    caller: int
    uses: int = 1


class CallTurn(Struct, eq=False):
    """Waiting or running call. `line`: queue within the caller's calls. A blocked call holds up its
    line. `run`: function that runs the call. `subject`: name of the called model; empty if
    unknown."""

    line: Hashable
    place: CallPlace
    run: Callable[[], object]
    subject: bytes = b""


class Admission:
    """Places and turns for one kind of calls. `count`: number of taken places."""

    def __init__(self, limits: AdmissionLimits) -> None:
        running = limits.places if limits.running is None else limits.running
        self._limits = limits
        self._running_limit = running
        self._caller_places = math.ceil(limits.places * limits.caller_share)
        self._caller_running = math.ceil(running * limits.caller_share)
        self._subject_running = math.ceil(running * limits.subject_share)
        self.count = 0
        self._held: Counter[int] = Counter()  # caller -> places
        self._running: Counter[int] = Counter()  # caller -> running calls
        self._active = 0  # running calls of all callers
        # subject -> [running calls, running and waiting calls]
        self._subjects: dict[bytes, list[int]] = {}
        self._waiting: dict[int, dict[Hashable, deque[CallTurn]]] = {}  # caller -> line -> turns

    # --- places

    def full(self, caller: int) -> Full | None:
        """Return why this caller can have no place now, or None if a place is free."""
        if self._held.get(caller, 0) >= self._caller_places:
            return Full.SHARE
        return Full.PLACES if self.count >= self._limits.places else None

    def enter(self, caller: int) -> CallPlace:
        """Take a place. Call `full` first."""
        self.count += 1
        self._held[caller] += 1
        return CallPlace(caller)

    def leave(self, place: CallPlace, turn: CallTurn | None = None) -> bool:
        """Give up one use of a place, and the turn of a call which need not run any more.

        Return True if the turn was still waiting; such a turn will never begin. Otherwise return
        False.
        """
        place.uses -= 1
        if not place.uses:
            self.count -= 1
            _decrement(self._held, place.caller)
        if turn is None or not self._waiting or not self._remove(turn):
            return False
        self._forget_subject(turn.subject, 0)
        self.leave(place)
        return True

    # --- turns

    def begin(self, turn: CallTurn) -> bool:
        """Begin a turn, which uses its place until `end`.

        Return True if the call runs now; False if the call waits until `end` returns its turn.

        Raise QueueFull, with the place unchanged, if the subject has reached `subject_limit`.
        """
        subject = turn.subject
        counts = self._subjects.setdefault(subject, [0, 0])
        if subject and counts[1] >= self._limits.subject_limit:
            raise QueueFull(
                f"model '{subject.decode(errors='replace')}' has {counts[1]} requests that wait"
                " or run already (max_model_requests)"
            )
        turn.place.uses += 1
        counts[1] += 1
        if self._active < self._running_limit and self._may_run(turn):
            self._start(turn)
            return True
        lines = self._waiting.setdefault(turn.place.caller, {})
        lines.setdefault(turn.line, deque()).append(turn)
        return False

    def end(self, turn: CallTurn) -> list[CallTurn]:
        """End a turn that ran. Return the turns which begin now, for the caller to run."""
        self._active -= 1
        _decrement(self._running, turn.place.caller)
        self._forget_subject(turn.subject, 1)
        self.leave(turn.place)
        following: list[CallTurn] = []
        while self._waiting and self._active < self._running_limit:
            next_turn = self._next()
            if next_turn is None:
                break
            self._start(next_turn)
            following.append(next_turn)
        return following

    def _start(self, turn: CallTurn) -> None:
        self._active += 1
        self._running[turn.place.caller] += 1
        self._subjects[turn.subject][0] += 1

    def _may_run(self, turn: CallTurn) -> bool:
        """Return True if neither the turn's caller nor its subject has reached its share."""
        running = self._running.get(turn.place.caller, 0)
        return (
            running < self._caller_running
            and self._subjects[turn.subject][0] < self._subject_running
        )

    def _forget_subject(self, subject: bytes, running: int) -> None:
        counts = self._subjects[subject]
        counts[0] -= running
        counts[1] -= 1
        if not counts[1]:
            del self._subjects[subject]

    def _next(self) -> CallTurn | None:
        """Remove and return the next turn allowed to run, or None. The caller and the line go to
        the back."""
        for caller, lines in self._waiting.items():
            for name, line in lines.items():
                if self._may_run(line[0]):
                    turn = line.popleft()
                    del lines[name]
                    if line:
                        lines[name] = line
                    del self._waiting[caller]
                    if lines:
                        self._waiting[caller] = lines
                    return turn
        return None

    def _remove(self, turn: CallTurn) -> bool:
        lines = self._waiting.get(turn.place.caller, {})
        line = lines.get(turn.line)
        if line is None or turn not in line:
            return False
        line.remove(turn)
        if not line:
            del lines[turn.line]
            if not lines:
                del self._waiting[turn.place.caller]
        return True


def _decrement(counts: Counter[Any], key: Hashable) -> None:
    remaining = counts[key] - 1
    if remaining:
        counts[key] = remaining
    else:
        del counts[key]
