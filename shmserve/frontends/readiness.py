"""What a greenlet of a hub waits for."""

from __future__ import annotations

import select
from math import inf

from greenlet import greenlet

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Readiness:
    """What one greenlet waits for: a descriptor, with a deadline or without.

    Attributes:
        fd: -1: only for a time, or to be woken.
        armed: what the epoll set has of it.
        due: when the wait ends; inf: never.
        filed: when the hub looks at it, which may be earlier; inf: not at all.
    """

    __slots__ = ("armed", "due", "fd", "filed", "waiter")

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self.armed = 0
        self.due = self.filed = inf
        self.waiter: greenlet | None = None
