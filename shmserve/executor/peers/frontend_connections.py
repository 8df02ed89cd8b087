"""Frontends connected to this executor: the segments that a frontend may name, and the slots it
holds."""

import os
import select
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.errors import StaleDescriptor
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, Execute
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from shmserve.transport import channel as transport

_MAX_FREED = 1024  # limit per answer, as a message has a largest size


class FrontendProcess:
    """A frontend process, which may have many connections. `held`: this executor's output slots
    that the frontend has not released: number of leases by (slot, generation). `freed`: the
    frontend's input slots that a model kept and has released since. Finalizers append to this
    list. `inline_bytes`: outputs of fewer bytes are sent in the answer itself."""

    inline_bytes = 0

    def __init__(self, name: str, mappings: Mappings | None = None) -> None:
        self.name = name
        self.segments = PeerSegments(mappings=mappings)
        self.held: dict[tuple[int, int], int] = {}
        self.freed: list[tuple[int, int]] = []
        self.connections: set[FrontendConnection] = set()

    def hold(self, leases: Iterable[tuple[int, int]]) -> None:
        """Record leases on output slots, just before the frontend is told of the slots."""
        held = self.held
        for lease in leases:
            held[lease] = held.get(lease, 0) + 1

    def close(self, memory: ArenaMemory) -> None:
        """Release every lease, after the last connection of the frontend is gone."""
        for lease, count in self.held.items():
            try:
                for _ in range(count):
                    memory.release(*lease)
            except StaleDescriptor:
                continue
        self.held.clear()
        self.segments.clear()

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        count = min(len(self.freed), _MAX_FREED)  # the next answers carry the rest
        taken = tuple(self.freed[:count])
        del self.freed[:count]
        return taken


class FrontendConnection(Struct, eq=False):
    """A data channel whose frontend has sent its hello."""

    channel: transport.Channel
    frontend: FrontendProcess
    known: set[int] = set()  # this executor's segments that the peer knows
    drops: int = 0  # number of dropped segments that the peer has been told of
    refusing: bool = False  # no further message is read
    closed: bool = False
    mask: int = select.EPOLLIN  # events that epoll reports, besides the end of the channel
    # answers that the peer has no room for yet
    backlog: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    fd: int = -1

    def __post_init__(self) -> None:
        self.fd = self.channel.fileno()

    @property
    def reads(self) -> bool:
        """Return True if further messages are read."""
        return not self.refusing

    def watch(self, epoll: select.epoll) -> None:
        """Have epoll report new messages unless refused, and room for answers while answers are
        kept."""
        mask = select.EPOLLIN if self.reads else 0
        if self.backlog:
            mask |= select.EPOLLOUT
        if mask != self.mask and not self.closed:
            epoll.modify(self.fd, mask)
            self.mask = mask

    def refuse(self, epoll: select.epoll) -> None:
        """Take no more messages than have been sent already, in a way that the peer notices."""
        self.refusing = True
        self.channel.refuse()
        self.watch(epoll)

    def keep(self, epoll: select.epoll, data: bytes, fds: Sequence[int]) -> None:
        """Keep an answer until the peer has room. Raise TooLarge if the answer is too long for any
        message. Raise OSError if no descriptor is left."""
        if len(data) > transport.MAX_MESSAGE:
            raise transport.too_large(data)
        self.backlog.append((data, [os.dup(fd) for fd in fds]))
        self.watch(epoll)

    def send_backlog(self) -> None:
        """Send kept answers as far as the peer has room. Raises PeerDied."""
        while self.backlog and self.channel.send(*self.backlog[0], wait=False):
            transport.close_all(self.backlog.popleft()[1])
            self.took()

    def took(self) -> None:
        """Do nothing when the peer takes a kept answer: frontends have no time limit, unlike
        lanes."""

    def with_news(
        self, answer: Answer, segments: Iterable[int], memory: ArenaMemory
    ) -> tuple[Answer, list[int]]:
        """Add memory news to an answer: new segments, dropped segments, and slots that a model has
        released. Return the answer and the descriptors of the new segments."""
        offers, fds = memory.offers(set(segments), self.known)
        self.drops = memory.drops
        extended = replace(
            answer,
            offers=tuple(offers),
            dropped=answer.dropped + memory.dropped(self.known),
            freed=answer.freed or self.frontend.take_freed(),
        )
        return extended, fds

    def close(self) -> None:
        """Close the channel and drop kept answers."""
        self.closed = True
        self.channel.close()
        while self.backlog:
            transport.close_all(self.backlog.popleft()[1])


FromPeer = Execute | Cancel | Credit
Event = tuple[FrontendConnection, FromPeer | None]  # None: the connection is closed


def sent_ns(event: Event) -> float:
    """Return the sort key of an event: the send time of a request; all other events come last."""
    message = event[1]
    return message.sent_ns if type(message) is Execute else inf


class Peers:
    """The connections of frontends and lanes. For the thread that uses the channels. `by_fd`: open
    connections, by descriptor. `events`: events that `Channels.receive` has not returned yet."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.by_fd: dict[int, FrontendConnection] = {}
        self.events: list[Event] = []

    def close(self, connection: FrontendConnection) -> bool:
        """Close a connection and add an event for the loop. Return False if it was closed
        already."""
        if connection.closed:
            return False
        del self.by_fd[connection.fd]
        self.epoll.unregister(connection.fd)
        connection.close()
        self.events.append((connection, None))
        return True
