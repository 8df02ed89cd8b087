"""What a process has asked the coordinator and not been told yet (`Link.ask`, `Link.grant`).

A request outlives the connection it was sent on: it is sent again, marked as such, to the
coordinator's successor. Its answer may carry fds, which always end up with exactly one owner.

Not thread-safe: its owner calls everything with its lock held, so that each coordinator is asked
once.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from shmserve import waiting
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator

Make = Callable[[int, bool], ToCoordinator]  # (ticket, asked before) to a message
Late = Callable[[FromCoordinator], None]


class PendingRequest(Struct, eq=False):
    """One request. `answer` and `fds` are set before `answered` is."""

    ticket: int
    make: Make
    late: Late | None
    answered: waiting.WaitEvent = field(default_factory=waiting.event)
    answer: FromCoordinator | None = None
    fds: list[int] = []
    abandoned: bool = False

    def abandon(self) -> None:
        """Nobody waits for the answer any more; when it comes, it is `late`."""
        self.abandoned = True


class PendingRequests:
    """The open requests of one process, by ticket."""

    def __init__(self) -> None:
        self._open: dict[int, PendingRequest] = {}

    def open(self, ticket: int, make: Make, late: Late | None = None) -> PendingRequest:
        """A new request. `late` is for an answer that comes when nobody waits any more."""
        request = self._open[ticket] = PendingRequest(ticket, make, late)
        return request

    def close(self, request: PendingRequest, connected: bool) -> None:
        if request.late is not None and connected:
            request.abandon()
        else:
            self._open.pop(request.ticket, None)

    def again(self) -> list[ToCoordinator]:
        """What is waited for, for a coordinator that may have been asked before."""
        return [r.make(r.ticket, True) for r in self._open.values() if not r.abandoned]

    def take(self, ticket: int) -> PendingRequest | None:
        """The request that an answer is for, if there is (still) one; it is open no more."""
        return self._open.pop(ticket, None)

    def disconnected(self) -> None:
        """Answers to what nobody waits for will not come any more."""
        self._open = {t: r for t, r in self._open.items() if not r.abandoned}
