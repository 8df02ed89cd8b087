"""What a process has to tell the coordinator and has not sent yet, oldest first.

Not thread-safe: its owner calls everything with its lock held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from shmserve.protocol.control.messages import VOID, ToCoordinator
from shmserve.transport.channel import close_all

_LIMIT = 4096  # messages; beyond that the oldest but one is lost

Entry = tuple[ToCoordinator, list[int]]


class Outbox:
    """Messages, each with the descriptors that ride along; those are ours until it is sent."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def append(self, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        if len(self._entries) >= _LIMIT:
            close_all(self._entries[1][1])  # the first is perhaps just being sent
            del self._entries[1]
        self._entries.append((message, [os.dup(fd) for fd in fds]))

    def first(self) -> Entry | None:
        """What is to be sent next; it stays until `sent` is called with it."""
        return self._entries[0] if self._entries else None

    def sent(self, entry: Entry) -> None:
        """It has been sent; what could not be stays."""
        if self._entries and self._entries[0] is entry:
            self._entries.popleft()
            close_all(entry[1])

    def disconnected(self) -> None:
        """Drop what is void for another coordinator: descriptors are for one only."""
        entries, self._entries = self._entries, deque()
        for message, fds in entries:
            if fds or isinstance(message, VOID):
                close_all(fds)
            else:
                self._entries.append((message, fds))
