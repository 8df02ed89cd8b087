"""A frontend's connection to an executor, with at most one request in flight."""

from __future__ import annotations

from shmserve.core.scheduling.caller_number import UNKNOWN
from shmserve.shm.arena import ArenaMemory
from shmserve.transport.channel import Channel


class ExecutorConnection:
    """A channel, which of our segments were already offered on it, and as of when (`drops`).
    `caller`: whose request is on it."""

    __slots__ = ("caller", "channel", "drops", "known")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.caller = UNKNOWN
        self.known: set[int] = set()
        self.drops = 0

    def forget_dropped(self, memory: ArenaMemory) -> tuple[int, ...]:
        """Forget the segments that are no more. Return those that the executor knows."""
        self.drops = memory.drops
        return memory.dropped(self.known)
