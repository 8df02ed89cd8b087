"""The frontends connected to this executor: what they may name, what they hold of ours."""

from __future__ import annotations

from collections import deque

from shmserve.errors import StaleDescriptor
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.channel import Channel


class FrontendProcess:
    """One frontend process; it may have many connections.

    `held` are our output slots it has not released; `freed` its own input slots that a
    model kept and has let go of since (filled by finalizers, so only ever appended to).
    """

    def __init__(self, name: str, mappings: Mappings | None = None) -> None:
        self.name = name
        self.segments = PeerSegments(mappings=mappings)
        self.held: set[tuple[int, int]] = set()
        self.freed: list[tuple[int, int]] = []
        self.connections = 0

    def release(self, memory: ArenaMemory, slots: tuple[tuple[int, int], ...]) -> None:
        """It is done with output slots; what it does not hold it cannot release."""
        for lease in slots:
            if lease in self.held:
                self.held.discard(lease)
                memory.release(*lease)

    def close(self, memory: ArenaMemory) -> None:
        """Its last connection is gone: everything it held comes back."""
        for lease in self.held:
            try:
                memory.release(*lease)
            except StaleDescriptor:
                continue
        self.held.clear()
        self.segments.clear()

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        if not self.freed:
            return ()
        count = len(self.freed)
        taken = tuple(self.freed[:count])
        del self.freed[:count]
        return taken


class Connection:
    """One data channel. `frontend` is None until its hello."""

    __slots__ = (
        "backlog",
        "channel",
        "closed",
        "drops",
        "fd",
        "frontend",
        "known",
        "refusing",
    )

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.frontend: FrontendProcess | None = None
        self.known: set[int] = set()  # our segments offered on it
        self.refusing = False  # no further message comes in
        self.drops = 0  # how many of our segments were gone when it was last told
        self.closed = False
        self.backlog: deque[tuple[bytes, list[int]]] = deque()  # answers it has no room for yet
