"""Watched peers: the connections that epoll watches for an executor, and what has come on them."""

from __future__ import annotations

import select

from shmserve.executor.peers.frontend_connections import Event, FrontendConnection


class WatchedPeers:
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
