"""Open connections of one process: number, shares of callers, and the connection that ends to make
room.

Connections do not report each request here, since a report would cost every request a call. When
room is needed, all idle connections are sorted once, and the sorted list is used for the next
second. A connection that became idle later has not been idle long enough anyway. So finding the
longest idle of many thousand connections costs one look at each connection per second, however
many clients ask for room.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from shmserve.core.scheduling.admission import Admission, AdmissionLimits, CallPlace, Full

CROWDED_IDLE_S = 1.0  # seconds of idle time before a connection may give way to a new one


class OpenConnection(Hashable, Protocol):
    """A connection, as `OpenConnections` uses it."""

    @property
    def idle_since(self) -> float:
        """The time since which the connection is idle; infinite while the connection is in use."""
        ...

    def give_way(self) -> None:
        """End to make room for another connection: now, or in the next turn on the loop."""
        ...


C = TypeVar("C", bound=OpenConnection)


class OpenConnections(Generic[C]):
    """At most `limit` connections, with at most the fraction `caller_share` for one caller.
    `ended`: connections that have ended or were refused so far. `ended_at`: the time of the last
    such end."""

    def __init__(self, limit: int, caller_share: float = 1.0) -> None:
        self._admission = Admission(AdmissionLimits(limit, caller_share=caller_share))
        self._open: dict[C, CallPlace] = {}
        # Connections idle at `_sorted_at`, longest idle first: of each caller, and of all callers
        # (None)
        self._idlers: dict[int | None, deque[tuple[float, C]]] = {}
        self._sorted_at = -inf
        self.ended = 0
        self.ended_at = -inf

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self, caller: int, now: float) -> bool:
        """Return True if there is room for another connection of the caller. If necessary an idle
        connection gives way: a connection of the same caller if the caller has its share."""
        full = self._admission.full(caller)
        return full is None or self.end_longest_idle(now, caller if full is Full.SHARE else None)

    def end_longest_idle(self, now: float, caller: int | None = None) -> bool:
        """Have the longest idle connection (of `caller`) give way. Return False if no connection
        has been idle for `CROWDED_IDLE_S`."""
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
        """Note that a connection has ended or was refused."""
        self.ended += 1
        self.ended_at = monotonic()
