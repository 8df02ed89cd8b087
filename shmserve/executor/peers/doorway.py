"""Doorway: accepts connections of frontends and reads the hello of each."""

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

_NO_DESCRIPTOR_S = 0.01  # pause before the next accept, as the listener stays readable


class Doorway:
    """Admission of frontends: a listener, connections that have sent no hello, and connected
    processes.

    Attributes:
        frontends: connected frontend processes, by name and pid.
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
        """Handle a descriptor that epoll has reported, if the doorway owns the descriptor.

        Yield each welcomed connection. Further messages of the connection are reported by the same
        epoll. The caller closes the connection.
        """
        if fd in self._strangers:
            yield from self._greet(self._strangers[fd])
        elif fd == self._listener.fileno():
            while (channel := self._accept()) is not None:
                yield from self._greet(channel)

    def shut(self) -> Iterator[FrontendConnection]:
        """Refuse new frontends in a way that they notice. Yield connections whose hello had
        arrived before."""
        transport.refuse(self._listener)
        while self._accept() is not None:
            continue
        self._epoll.unregister(self._listener.fileno())
        for channel in list(self._strangers.values()):
            channel.refuse()
            yield from self._greet(channel)

    def close(self) -> None:
        """Close every connection that has not sent a hello, and forget all frontends."""
        for channel in self._strangers.values():
            channel.close()
        self._strangers.clear()
        for frontend in self.frontends.values():  # frontends whose channels were refused
            frontend.close(self._memory)
        self.frontends.clear()

    def _accept(self) -> Channel | None:
        try:
            channel = transport.accept(self._listener)
        except OSError as ex:  # no descriptor is left; waiting frontends go on waiting
            log.warning("a channel could not be accepted: %s", ex.strerror)
            time.sleep(_NO_DESCRIPTOR_S)
            return None
        if channel is not None:
            self._strangers[channel.fileno()] = channel
            self._epoll.register(channel.fileno(), select.EPOLLIN)
        return channel

    def _greet(self, channel: Channel) -> Iterator[FrontendConnection]:
        """Read the hello of a channel, if it has arrived, and answer."""
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
        """Forget a closed connection. With the last connection of a process, release everything
        that the process held."""
        frontend = connection.frontend
        frontend.connections.discard(connection)
        if not frontend.connections:
            frontend.close(self._memory)
            del self.frontends[frontend.name, connection.channel.peer_pid]
