"""Pending requests to the coordinator: asked and not yet answered (`Link.ask`, `Link.grant`).

A request outlives its connection: the next coordinator gets the request again, marked as a
repetition. An answer may carry fds, which always end up with exactly one owner.

Not thread-safe: the owner holds its lock for every call, so that each coordinator is asked once.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from shmserve import waiting
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator

# makes the message of a ticket; the flag marks a repetition
Make = Callable[[int, bool], ToCoordinator]
Late = Callable[[FromCoordinator], None]


class PendingRequest(Struct, eq=False):
    """Request to the coordinator. `answer` and `fds` are set before `answered`."""

    ticket: int
    make: Make
    late: Late | None
    answered: waiting.WaitEvent = field(default_factory=waiting.event)
    answer: FromCoordinator | None = None
    fds: list[int] = []
    abandoned: bool = False


class PendingRequests:
    """Open requests of a process, by ticket."""

    def __init__(self) -> None:
        self._open: dict[int, PendingRequest] = {}

    def open(self, ticket: int, make: Make, late: Late | None = None) -> PendingRequest:
        """Add a request. `late` gets an answer after the caller has stopped waiting."""
        request = self._open[ticket] = PendingRequest(ticket, make, late)
        return request

    def close(self, request: PendingRequest, connected: bool) -> None:
        if request.late is not None and connected:
            request.abandoned = True
        else:
            self._open.pop(request.ticket, None)

    def again(self) -> list[ToCoordinator]:
        """Return messages to repeat all awaited requests to a new coordinator."""
        return [r.make(r.ticket, True) for r in self._open.values() if not r.abandoned]

    def take(self, ticket: int) -> PendingRequest | None:
        """Remove and return the request of an answer; None if the request is closed."""
        return self._open.pop(ticket, None)

    def disconnected(self) -> None:
        """Drop abandoned requests: a new coordinator will not answer them."""
        self._open = {t: r for t, r in self._open.items() if not r.abandoned}
