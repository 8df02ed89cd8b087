"""Executor connection: a frontend's connection to an executor, with at most one request in
flight."""

from msgspec import Struct

from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.shm.arena import ArenaMemory
from shmserve.transport.channel import Channel


class ExecutorConnection(Struct, eq=False):
    """A channel to an executor. `caller`: number of the caller whose request is on the connection.
    `known`: numbers of the segments already offered on the channel. `drops`: value of
    `ArenaMemory.drops` when `known` was last cleaned. `welcomed`: the executor has answered on the
    channel. An executor without memory may close a channel unread, and live on."""

    channel: Channel
    caller: int = UNKNOWN_CALLER
    known: set[int] = set()
    drops: int = 0
    welcomed: bool = False

    def forget_dropped(self, memory: ArenaMemory) -> tuple[int, ...]:
        """Forget removed segments. Return the removed segments that the executor knows."""
        self.drops = memory.drops
        return memory.dropped(self.known)
