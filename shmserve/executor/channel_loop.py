"""An executor's channels to its frontends: accept, receive, send, close; all in one thread.

A peer that breaks the protocol loses its channel and nothing else happens. What is done with
requests is for `loop` and `stream_loop`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from abc import ABC, abstractmethod

import msgspec
from msgspec import DecodeError

from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError
from shmserve.executor.loop.connections import Connection, FrontendProcess
from shmserve.protocol import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Cancel,
    Credit,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
    SegmentOffer,
    leases,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.status_page import StatusPage
from shmserve.transport import channel as channels

log = logging.getLogger(__name__)

_FRESH_NS = 1_000_000


class ChannelLoop(ABC):
    """The channels that one listener has let in."""

    def __init__(
        self,
        *,
        process: str,
        instance: str,
        listener: socket.socket,
        memory: ArenaMemory,
        status: StatusPage,
        mappings: Mappings,
    ) -> None:
        self._hello = messages.encode(ExecutorHello(messages.VERSION, process, instance))
        self._listener = listener
        self._memory = memory
        self._status = status
        self._mappings = mappings
        self._connections: dict[int, Connection] = {}
        self._frontends: dict[tuple[str, int], FrontendProcess] = {}
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._closed = False  # to new connections

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"w")
        except BlockingIOError:
            pass

    def _take_the_last(self) -> None:
        """Refuse everything new in such a way that a sender knows, and take what was sent.

        So a request is either taken and answered, or its frontend has seen that it was not
        and sends it to another executor.
        """
        self._closed = True
        channels.refuse(self._listener)
        while self._accept():
            continue
        self._epoll.unregister(self._listener.fileno())
        busy = self._busy()
        for connection in list(self._connections.values()):
            if connection.fd not in busy:
                self._refuse(connection)

    def _refuse(self, connection: Connection) -> None:
        """Take no more requests on a channel than have been sent on it already."""
        if connection.refusing:
            return
        connection.refusing = True
        connection.channel.refuse()
        self._epoll.unregister(connection.fd)  # it would report its end all the time
        self._receive(connection)

    def close(self) -> None:
        """Close every channel and fd of the loop; after `run` has returned."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # ------------------------------------------------------- what others make of it

    @abstractmethod
    def _requested(self, connection: Connection, message: Execute) -> None:
        """A request has come."""

    @abstractmethod
    def _cancel(self, connection: Connection, request: int) -> None:
        """A request is not wanted any more."""

    @abstractmethod
    def _credit(self, connection: Connection, message: Credit) -> None:
        """Answers of a stream were consumed."""

    @abstractmethod
    def _gone(self, connection: Connection) -> None:
        """A channel is closed: nothing of it is wanted any more."""

    @abstractmethod
    def _busy(self) -> set[int]:
        """Channels with a request that has been taken and not answered."""

    # ----------------------------------------------------------------- input

    def _ready(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None:
            self._receive(connection)
        elif fd == self._listener.fileno():
            self._accept()
        else:
            try:
                os.read(self._wake_r, 64)
            except BlockingIOError:
                pass

    def _accept(self) -> bool:
        channel = channels.accept(self._listener)
        if channel is None:
            return False
        connection = Connection(channel)
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        return True

    def _receive(self, connection: Connection) -> None:
        try:
            while True:
                received = connection.channel.receive_now()
                if received is None:
                    return
                if self._take(connection, *received) and not connection.refusing:
                    return
        except PeerDied:
            if not connection.refusing:  # else it is our own doing
                self._close(connection)
        except ProtocolViolation as ex:
            log.warning("closing a channel of pid %d: %s", connection.channel.peer_pid, ex)
            self._close(connection)

    def _take(self, connection: Connection, data: memoryview, fds: list[int]) -> bool:
        """Handle one message; True: no further one can be waiting behind it."""
        try:
            message = messages.decode_to_executor(data)
        except DecodeError as ex:
            for fd in fds:
                os.close(fd)
            raise ProtocolViolation(f"unreadable message: {ex}") from ex
        if isinstance(message, Execute) and connection.frontend is not None:
            self._take_request(connection, connection.frontend, message, fds)
            # Only a request that has waited can have its cancellation behind it.
            return time.monotonic_ns() - message.sent_ns < _FRESH_NS
        for fd in fds:
            os.close(fd)
        if isinstance(message, FrontendHello):
            self._welcome(connection, message)
        elif connection.frontend is None:
            raise ProtocolViolation("no hello before the first request")
        elif isinstance(message, Release):
            connection.frontend.release(self._memory, message.slots)
            self._tell_freed(connection, connection.frontend)
        elif isinstance(message, Cancel):
            self._cancel(connection, message.request)
        elif isinstance(message, Credit):
            connection.frontend.release(self._memory, message.slots)
            self._credit(connection, message)
        return False

    def _take_request(
        self, connection: Connection, frontend: FrontendProcess, message: Execute, fds: list[int]
    ) -> None:
        if message.offers or fds:
            frontend.segments.accept(message.offers, fds)
        if message.dropped:
            frontend.segments.drop(message.dropped)
        if message.release:
            frontend.release(self._memory, message.release)
        self._requested(connection, message)

    def _tell_freed(self, connection: Connection, frontend: FrontendProcess) -> None:
        """A frontend that sends releases by themselves has no answer that could tell it."""
        if frontend.freed:
            self._send(connection, Answer(0), [])

    def _welcome(self, connection: Connection, hello: FrontendHello) -> None:
        if hello.version != messages.VERSION or connection.frontend is not None:
            raise ProtocolViolation(f"hello of version {hello.version}")
        key = (hello.process, connection.channel.peer_pid)
        frontend = self._frontends.setdefault(key, FrontendProcess(hello.process, self._mappings))
        frontend.connections += 1
        connection.frontend = frontend
        fd = self._status.segment.reader_fd()
        try:
            connection.channel.send(self._hello, [fd])
        finally:
            os.close(fd)

    def _close(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._connections.pop(connection.fd, None)
        if not connection.refusing:
            self._epoll.unregister(connection.fd)
        connection.channel.close()
        self._gone(connection)
        frontend = connection.frontend
        if frontend is not None:
            frontend.connections -= 1
            if not frontend.connections:
                frontend.close(self._memory)
                self._frontends.pop((frontend.name, connection.channel.peer_pid), None)

    # ---------------------------------------------------------------- output

    def _send(self, connection: Connection, answer: Answer, segments: list[int]) -> None:
        frontend = connection.frontend
        assert frontend is not None
        if connection.closed:  # while the model ran
            frontend.release(self._memory, tuple(leases(answer.outputs)))
            return
        fds: list[int] = []
        if self._closed and answer.final:  # the channel is idle once the answer is there
            self._refuse(connection)
        try:
            new = set(segments) - connection.known
            if new or connection.drops != self._memory.drops or frontend.freed:
                offers, fds = self._memory.offers(new, connection.known)
                answer = self._with_extras(connection, answer, tuple(offers))
            self._transmit(connection, messages.encode(answer), fds)
        except PeerDied:
            self._close(connection)
        except ShmserveError as ex:  # too long to send: tell that instead
            held = tuple(leases(answer.outputs))
            frontend.release(self._memory, held)
            connection.known.difference_update(segments)
            told = msgspec.structs.replace(
                answer, outputs=(), parameters={}, error_code=ex.code, error=ex.message, offers=()
            )
            self._send(connection, told, [])
        finally:
            for fd in fds:
                os.close(fd)

    def _transmit(self, connection: Connection, data: bytes, fds: list[int]) -> None:
        connection.channel.send(data, fds)

    def _with_extras(
        self, connection: Connection, answer: Answer, offers: tuple[SegmentOffer, ...]
    ) -> Answer:
        assert connection.frontend is not None
        connection.drops = self._memory.drops
        return msgspec.structs.replace(
            answer,
            offers=offers,
            dropped=answer.dropped + self._memory.dropped(connection.known),
            freed=answer.freed + connection.frontend.take_freed(),
        )
