"""Outbox: unsent messages of a process to the coordinator, oldest first.

Not thread-safe: the owner holds its lock for every call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from shmserve.protocol.control.messages import VOID, ToCoordinator
from shmserve.transport.channel import close_all

_LIMIT = 4096  # messages; beyond that the second oldest is lost

Entry = tuple[ToCoordinator, list[int]]


class Outbox:
    """Queue of messages with their descriptors, which the outbox owns until the message is
    sent."""

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
