"""All connections of the engine: how many there may be, and which ends where others want room."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from shmserve.config import Settings
from shmserve.core.scheduling.admission import Admission, AdmissionLimits, CallPlace, Full
from shmserve.frontends.hub import CROWDED_IDLE_S


class OpenConnection(Protocol):
    """A connection as the engine sees it.

    Attributes:
        caller: whose it is, as `caller_numbers` numbers them.
        due: when `tick` has something to do, as far as was known when that was last looked at.
        touched: something has happened since then.
    """

    caller: int
    due: float
    touched: bool

    @property
    def idle_since(self) -> float:
        """Since when it has not been in use; infinite: it is."""
        ...

    def look(self, now: float) -> None:
        """See when `tick` is due."""
        ...

    def tick(self, now: float) -> None:
        """See whether its client has been too slow, or it is too old."""
        ...

    def drain(self) -> None:
        """Ask the client to go elsewhere."""
        ...

    def terminate(self) -> None:
        """End it now."""
        ...


class OpenConnections:
    """At most `max_connections`, and of one caller `max_caller_share` of these."""

    def __init__(self, settings: Settings) -> None:
        limits = AdmissionLimits(settings.max_connections, caller_share=settings.max_caller_share)
        self._admission = Admission(limits)
        self._open: dict[OpenConnection, CallPlace] = {}

    def __iter__(self) -> Iterator[OpenConnection]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def room_for(self, caller: int, now: float) -> bool:
        """Whether there is room for another of this caller, made by ending an idle one if need
        be: its own, where it has its share."""
        full = self._admission.full(caller)
        return full is None or self.end_idle(now, caller if full is Full.SHARE else None)

    def end_idle(self, now: float, caller: int | None = None) -> bool:
        """End the one that has been idle the longest (of `caller`); False: none has for long."""
        since, _, connection = min(
            (
                (one.idle_since, number, one)
                for number, one in enumerate(self._open)
                if caller is None or one.caller == caller
            ),
            default=(math.inf, 0, None),
        )
        if connection is None or since > now - CROWDED_IDLE_S:
            return False
        connection.terminate()
        return True

    def add(self, connection: OpenConnection) -> None:
        self._open[connection] = self._admission.enter(connection.caller)

    def discard(self, connection: OpenConnection) -> None:
        """It has ended."""
        place = self._open.pop(connection, None)
        if place is not None:
            self._admission.leave(place)
