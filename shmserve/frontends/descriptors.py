"""The descriptors of one loop, in an epoll set: some are waited for, others have handlers.

Level-triggered: an event that nobody waits for takes its descriptor out of the set until somebody
does, so whoever waits looks at the kernel's present state and nothing is missed.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT

_Wait = TypeVar("_Wait")


class Descriptors(Generic[_Wait]):
    """What is told of the events of each descriptor.

    Attributes:
        waits: the wait for a descriptor, by number.
        handlers: the function that is called with a descriptor's events, by number.
        fresh: descriptors that the set got since it was polled. Events of a fresh descriptor are
            those of a closed one that had the same number.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.waits: dict[int, _Wait] = {}
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.fresh: set[int] = set()

    def handle(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call `handler` with the events of a descriptor, until `unhandle`. The handler must
        neither wait nor raise."""
        self.waits.pop(fd, None)  # of a closed descriptor that had the same number
        self.handlers[fd] = handler
        self.arm(fd, events)

    def unhandle(self, fd: int) -> None:
        """Called before the descriptor is closed. Idempotent."""
        if self.handlers.pop(fd, None) is not None:
            self.disarm(fd)

    def arm(self, fd: int, events: int, modify: bool = False) -> None:
        """Watch a descriptor for events. `modify`: the set has it already, for other events."""
        if modify:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
            self.fresh.add(fd)

    def disarm(self, fd: int) -> None:
        """Take a descriptor out of the set, which may have lost it already by its closing."""
        with suppress(OSError):
            self.epoll.unregister(fd)
