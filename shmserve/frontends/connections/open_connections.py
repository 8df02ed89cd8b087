"""Open connections of one process: their number, their shares, and which one ends to make room.

A connection does not tell this book of each request, which would cost every request a call. When
room is needed, all idle connections are sorted once, and the answers of the next second come from
that list: whatever has become idle since then has not been idle for long enough anyway. So the
longest idle of many thousand connections costs one look at each of them a second, however many
clients ask for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from shmserve.core.scheduling.admission import Admission, AdmissionLimits, CallPlace, Full

CROWDED_IDLE_S = 1.0  # after so much idle time a connection gives way to a new one


class OpenConnection(Hashable, Protocol):
    """A connection as its process's book sees it."""

    @property
    def idle_since(self) -> float:
        """The time at which the connection went out of use; infinite while it is in use."""
        ...

    def give_way(self) -> None:
        """End for another's sake: now, or as soon as the connection has the loop's turn."""
        ...


C = TypeVar("C", bound=OpenConnection)


class OpenConnections(Generic[C]):
    """At most `limit` connections, of which one caller has at most `caller_share`.

    Attributes:
        ended: connections that have ended or were refused so far.
        ended_at: the time of the last such end.
    """

    def __init__(self, limit: int, caller_share: float = 1.0) -> None:
        self._admission = Admission(AdmissionLimits(limit, caller_share=caller_share))
        self._open: dict[C, CallPlace] = {}
        # Of all callers (None) and of each: connections that were idle at `_sorted_at`
        self._idlers: dict[int | None, deque[tuple[float, C]]] = {}
        self._sorted_at = -inf
        self.ended = 0
        self.ended_at = -inf

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self, caller: int, now: float) -> bool:
        """Return True if there is room for another connection of this caller. If need be, an idle
        connection gives way: one of the same caller, where the caller has its share."""
        full = self._admission.full(caller)
        return full is None or self.end_longest_idle(now, caller if full is Full.SHARE else None)

    def end_longest_idle(self, now: float, caller: int | None = None) -> bool:
        """Have the longest idle connection (of `caller`) give way; return False if none has been
        idle for long."""
        latest = now - CROWDED_IDLE_S
        while True:
            idlers = self._idlers.get(caller)
            while idlers and idlers[0][0] <= latest:
                since, connection = idlers.popleft()
                if connection in self._open and connection.idle_since == since:
                    connection.give_way()
                    return True
            if idlers or self._sorted_at > latest:
                return False
            self._sort_idlers(now)

    def _sort_idlers(self, now: float) -> None:
        self._sorted_at = now
        self._idlers.clear()
        idle = [(c.idle_since, number, c) for number, c in enumerate(self._open)]
        for since, _, connection in sorted(entry for entry in idle if entry[0] < inf):
            for key in (None, self._open[connection].caller):
                self._idlers.setdefault(key, deque()).append((since, connection))

    def add(self, connection: C, caller: int) -> None:
        self._open[connection] = self._admission.enter(caller)

    def discard(self, connection: C) -> None:
        """Forget a connection that has ended."""
        place = self._open.pop(connection, None)
        if place is not None:
            self._admission.leave(place)
            self.count_end()

    def count_end(self) -> None:
        """Note that a connection has ended, or was refused."""
        self.ended += 1
        self.ended_at = monotonic()
