"""The frontends connected to this executor: what they may name, what they hold of ours."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

from msgspec.structs import replace

from shmserve.errors import StaleDescriptor
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, Execute
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport import channel as transport

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
    """One data channel whose frontend has said hello."""

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

    def __init__(self, channel: transport.Channel, frontend: FrontendProcess) -> None:
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

    def watch(self, epoll: select.epoll) -> None:
        """Have epoll look for what is of use now, and for room for what is kept."""
        mask = select.EPOLLIN if self.reads else 0
        if self.backlog:
            mask |= select.EPOLLOUT
        if mask != self.mask and not self.closed:
            epoll.modify(self.fd, mask)
            self.mask = mask

    def refuse(self, epoll: select.epoll) -> None:
        """Take no more messages than have been sent already, and let the peer know."""
        self.refusing = True
        self.channel.refuse()
        self.watch(epoll)

    def keep(self, epoll: select.epoll, data: bytes, fds: Sequence[int]) -> None:
        """Keep an answer until the peer has room.

        Raises:
            TooLarge: it is too long for any message.
            OSError: no descriptor is left.
        """
        if len(data) > transport.MAX_MESSAGE:
            raise transport.too_large(data)
        self.backlog.append((data, [os.dup(fd) for fd in fds]))
        self.watch(epoll)

    def send_backlog(self) -> None:
        """Send what was kept, as far as the peer has room. Raises PeerDied."""
        while self.backlog and self.channel.send(*self.backlog[0], wait=False):
            transport.close_all(self.backlog.popleft()[1])
            self.took()

    def took(self) -> None:
        """Note that the peer has taken an answer that was kept. A frontend may take its time."""

    def with_news(
        self, answer: Answer, segments: Iterable[int], memory: ArenaMemory
    ) -> tuple[Answer, list[int]]:
        """Return an answer that also tells which segments are new, which are gone and which slots a
        model has let go of; and the descriptors of the new ones."""
        offers, fds = memory.offers(set(segments), self.known)
        self.drops = memory.drops
        told = replace(
            answer,
            offers=tuple(offers),
            dropped=answer.dropped + memory.dropped(self.known),
            freed=answer.freed or self.frontend.take_freed(),
        )
        return told, fds

    def close(self) -> None:
        """Close the channel and drop what was kept."""
        self.closed = True
        self.channel.close()
        while self.backlog:
            transport.close_all(self.backlog.popleft()[1])


FromPeer = Execute | Cancel | Credit
Event = tuple[FrontendConnection, FromPeer | None]  # None: the connection is closed


def sent_ns(event: Event) -> float:
    """Sort key: whatever else comes of a request comes after it."""
    message = event[1]
    return message.sent_ns if type(message) is Execute else inf


class Peers:
    """The connections of frontends and lanes. For the thread that has the channels.

    Attributes:
        by_fd: open connections, by their descriptors.
        events: what has come and `Channels.receive` has not told yet.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.by_fd: dict[int, FrontendConnection] = {}
        self.events: list[Event] = []

    def close(self, connection: FrontendConnection) -> bool:
        """Close a connection, which is an event. Return False if it was closed already."""
        if connection.closed:
            return False
        del self.by_fd[connection.fd]
        self.epoll.unregister(connection.fd)
        connection.close()
        self.events.append((connection, None))
        return True
