"""Descriptors of one loop in an epoll set: greenlets wait for some, handlers serve the rest.

The set is level-triggered. An event without a waiting greenlet takes the descriptor out of the set
until the next wait. That wait registers the descriptor again and so sees the kernel's present
state: no event is missed.
"""

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT

_Wait = TypeVar("_Wait")


class Descriptors(Generic[_Wait]):
    """Receivers of each descriptor's events.

    Attributes:
        waits: the wait for each descriptor, by descriptor number.
        handlers: the function to call with a descriptor's events, by descriptor number.
        fresh: descriptors added to the set since the latest poll. An event of a fresh descriptor
            belongs to a closed descriptor that had the same number.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.waits: dict[int, _Wait] = {}
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.fresh: set[int] = set()

    def handle(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call `handler` with the events of a descriptor, until `unhandle`. The handler must
        neither wait nor raise."""
        self.waits.pop(fd, None)  # left by a closed descriptor that had the same number
        self.handlers[fd] = handler
        self.arm(fd, events)

    def unhandle(self, fd: int) -> None:
        """Stop handling a descriptor. Call before closing the descriptor. Idempotent."""
        if self.handlers.pop(fd, None) is not None:
            self.disarm(fd)

    def arm(self, fd: int, events: int, modify: bool = False) -> None:
        """Watch a descriptor for events. `modify`: the set has the descriptor for other events."""
        if modify:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
            self.fresh.add(fd)

    def disarm(self, fd: int) -> None:
        """Take a descriptor out of the set, if closing the descriptor has not done so already."""
        with suppress(OSError):
            self.epoll.unregister(fd)
