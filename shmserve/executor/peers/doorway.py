"""Doorway: lets frontends in: accepts connections, and reads the hello that each begins with."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Iterator

from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.executor.peers.frontend_connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import ExecutorHello, FrontendHello
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.status_page import StatusPage
from shmserve.transport import channel as transport
from shmserve.transport.channel import Channel, close_all

log = logging.getLogger(__name__)

_NO_DESCRIPTOR_S = 0.01  # before the listener, which stays readable, is looked at again


class Doorway:
    """One listener, the connections that have not said hello, and the processes of those that have.

    Attributes:
        frontends: connected frontend processes, by their name and pid.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: ExecutorHello,
        status: StatusPage,
        epoll: select.epoll,
        memory: ArenaMemory,
        mappings: Mappings,
    ) -> None:
        self.frontends: dict[tuple[str, int], FrontendProcess] = {}
        self._listener = listener
        self._hello = messages.encode(hello)
        self._status = status
        self._epoll = epoll
        self._memory = memory
        self._mappings = mappings
        self._strangers: dict[int, Channel] = {}
        epoll.register(listener.fileno(), select.EPOLLIN)

    def ready(self, fd: int) -> Iterator[FrontendConnection]:
        """Look at a descriptor that epoll has reported, if it is one of the doorway's. Yield each
        connection that has been welcomed; epoll reports its next messages as well, and whoever
        takes the connection closes it."""
        if fd in self._strangers:
            yield from self._greet(self._strangers[fd])
        elif fd == self._listener.fileno():
            while (channel := self._accept()) is not None:
                yield from self._greet(channel)

    def shut(self) -> Iterator[FrontendConnection]:
        """Let nobody in any more in such a way that frontends know. Yield whoever was welcomed."""
        transport.refuse(self._listener)
        while self._accept() is not None:
            continue
        self._epoll.unregister(self._listener.fileno())
        for channel in list(self._strangers.values()):
            channel.refuse()
            yield from self._greet(channel)

    def close(self) -> None:
        """Close every connection that has not said hello, and let go of all frontends."""
        for channel in self._strangers.values():
            channel.close()
        self._strangers.clear()
        for frontend in self.frontends.values():  # those whose channels were refused
            frontend.close(self._memory)
        self.frontends.clear()

    def _accept(self) -> Channel | None:
        try:
            channel = transport.accept(self._listener)
        except OSError as ex:  # no descriptor is left, and whoever waits goes on waiting
            log.warning("no channel accepted: %s", ex.strerror)
            time.sleep(_NO_DESCRIPTOR_S)
            return None
        if channel is not None:
            self._strangers[channel.fileno()] = channel
            self._epoll.register(channel.fileno(), select.EPOLLIN)
        return channel

    def _greet(self, channel: Channel) -> Iterator[FrontendConnection]:
        """Read the first message of a channel, if it is there, and answer it."""
        try:
            received = channel.receive_within()
            if received is None:
                return
            data, fds = received
            close_all(fds)
            hello = messages.decode_to_executor(data)
            if not isinstance(hello, FrontendHello):
                raise ProtocolViolation("no hello before the first request")
            if hello.version != messages.VERSION:
                raise ProtocolViolation(f"hello of version {hello.version}")
            fd = self._status.segment.reader_fd()
            try:
                channel.send(self._hello, [fd])
            finally:
                os.close(fd)
        except (PeerDied, ProtocolViolation, OSError) as ex:
            if not isinstance(ex, PeerDied):
                log.warning("closing a channel of pid %d: %s", channel.peer_pid, ex)
            self._strangers.pop(channel.fileno(), None)
            self._epoll.unregister(channel.fileno())
            channel.close()
        else:
            del self._strangers[channel.fileno()]
            yield self._connection(channel, hello)

    def _connection(self, channel: Channel, hello: FrontendHello) -> FrontendConnection:
        key = hello.process, channel.peer_pid
        frontend = self.frontends.setdefault(key, FrontendProcess(hello.process, self._mappings))
        connection = FrontendConnection(channel, frontend)
        frontend.connections.add(connection)
        return connection

    def left(self, connection: FrontendConnection) -> None:
        """Forget a connection that has closed. With the last one of a process all that the process
        held comes back."""
        frontend = connection.frontend
        frontend.connections.discard(connection)
        if not frontend.connections:
            frontend.close(self._memory)
            del self.frontends[frontend.name, connection.channel.peer_pid]
