"""The frontends connected to this executor: what they may name, what they hold of ours."""

from __future__ import annotations

from collections import Counter, deque

from shmserve.errors import StaleDescriptor
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport.channel import Channel

_MOST_FREED = 1024  # told with one answer, which has a largest size


class FrontendProcess:
    """One frontend process; it may have many connections.

    `held` are our output slots it has not released, with its leases on each; `freed` its own input
    slots that a model kept and has let go of since (filled by finalizers: only appended to).
    """

    def __init__(self, name: str, mappings: Mappings | None = None) -> None:
        self.name = name
        self.segments = PeerSegments(mappings=mappings)
        self.held: Counter[tuple[int, int]] = Counter()
        self.freed: list[tuple[int, int]] = []
        self.connections: set[FrontendConnection] = set()

    def close(self, memory: ArenaMemory) -> None:
        """Its last connection is gone: everything it held comes back."""
        for lease in self.held.elements():
            try:
                memory.release(*lease)
            except StaleDescriptor:
                continue
        self.held.clear()
        self.segments.clear()

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        count = min(len(self.freed), _MOST_FREED)  # the rest goes with the next answers
        taken = tuple(self.freed[:count])
        del self.freed[:count]
        return taken


class FrontendConnection:
    """One data channel whose frontend has said hello; its state is for `Channels` to change."""

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

    def __init__(self, channel: Channel, frontend: FrontendProcess) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.frontend = frontend
        self.known: set[int] = set()  # our segments offered on it
        self.drops = 0  # how many of our segments were gone when it was last told
        self.refusing = False  # no further message comes in
        self.closed = False
        self.backlog: deque[tuple[bytes, list[int]]] = deque()  # answers it has no room for yet
