"""Unsent messages and unanswered requests of a link, kept from connection to connection.

A request outlives its connection: the next coordinator gets the request again, marked as a
repetition. An answer may carry fds, which always end up with exactly one owner.

Not thread-safe: the owner holds its lock for every call, so that each coordinator is asked once.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from shmserve import waiting
from shmserve.protocol.control.messages import VOID, FromCoordinator, ToCoordinator
from shmserve.transport.channel import close_all

# makes the message of a ticket; the flag marks a repetition
Make = Callable[[int, bool], ToCoordinator]
Late = Callable[[FromCoordinator], None]
_LIMIT = 4096  # messages; beyond that the second oldest is lost

Entry = tuple[ToCoordinator, list[int]]


class Outbox:
    """Queue of messages with their descriptors, which the outbox owns until the message is sent."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def append(self, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        if len(self._entries) >= _LIMIT:
            close_all(self._entries[1][1])  # the oldest may be in the middle of being sent
            del self._entries[1]
        self._entries.append((message, [os.dup(fd) for fd in fds]))

    def first(self) -> Entry | None:
        """Return the next message to send, which stays in the outbox until `sent`; None if
        empty."""
        return self._entries[0] if self._entries else None

    def sent(self, entry: Entry) -> None:
        """Remove a sent message, and close its descriptors."""
        if self._entries and self._entries[0] is entry:
            self._entries.popleft()
            close_all(entry[1])

    def disconnected(self) -> None:
        """Drop messages that make sense only for the present coordinator, such as all messages
        with descriptors."""
        entries, self._entries = self._entries, deque()
        for message, fds in entries:
            if fds or isinstance(message, VOID):
                close_all(fds)
            else:
                self._entries.append((message, fds))


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
