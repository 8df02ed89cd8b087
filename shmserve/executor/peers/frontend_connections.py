"""The frontends connected to this executor: what they may name, what they hold of ours."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterable

from shmserve.errors import StaleDescriptor
from shmserve.protocol.control.data_messages import Cancel, Credit, Execute
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
        self.held: dict[tuple[int, int], int] = {}
        self.freed: list[tuple[int, int]] = []
        self.connections: set[FrontendConnection] = set()

    def hold(self, leases: Iterable[tuple[int, int]]) -> None:
        """It is about to be told of output slots of ours, which were leased to it."""
        held = self.held
        for lease in leases:
            held[lease] = held.get(lease, 0) + 1

    def close(self, memory: ArenaMemory) -> None:
        """Its last connection is gone: everything it held comes back."""
        for lease, count in self.held.items():
            try:
                for _ in range(count):
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
        "mask",
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
        self.mask: int = select.EPOLLIN  # what epoll looks for; the other end's end it tells anyway
        self.backlog: deque[tuple[bytes, list[int]]] = deque()  # answers it has no room for yet

    @property
    def reads(self) -> bool:
        """Return True if further messages are read."""
        return not self.refusing


FromPeer = Execute | Cancel | Credit
Event = tuple[FrontendConnection, FromPeer | None]  # None: the connection is closed
