"""An executor's channels to its frontends: accept, receive, send, close; all in one thread.

A peer that breaks the protocol loses its channel and nothing else happens. What is done with
requests is for the loops: they ask what has come, and send answers.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Iterable, Set

import msgspec

from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError, UnreadableMessage
from shmserve.executor.lanes.lane import Event, Lane, LoopSide
from shmserve.executor.lanes.lane_channels import LaneChannels
from shmserve.executor.loop.connections import FrontendConnection, FrontendProcess
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Cancel,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
    leases,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.status_page import StatusPage
from shmserve.transport import channel as transport
from shmserve.transport.channel import Channel, close_all

log = logging.getLogger(__name__)

_FRESH_NS = 1_000_000
_NO_DESCRIPTOR_S = 0.01  # before the listener, which stays readable, is looked at again


class Channels:
    """The channels that one listener has let in. Waits for no frontend: an answer that one has
    no room for is kept until it has.

    Attributes:
        closed: nothing new is let in.
        quiet: the last `receive` found that nothing at all had come.
        status: what frontends read of this executor.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: ExecutorHello,
        memory: ArenaMemory,
        status: StatusPage,
        mappings: Mappings,
        lanes: LaneChannels,
    ) -> None:
        self.closed = False
        self.quiet = True
        self._listener = listener
        self._hello = messages.encode(hello)
        self._memory = memory
        self.status = status
        self._mappings = mappings
        self._strangers: dict[int, Channel] = {}  # that have not said hello
        self._connections: dict[int, FrontendConnection] = {}
        self._frontends: dict[tuple[str, int], FrontendProcess] = {}
        self._events: list[Event] = []  # that `receive` has not told yet
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._lanes = lanes
        lanes.attach(LoopSide(self._epoll, self._told, self.wake))

    def wake(self) -> None:
        """Have `receive` return. From any thread or signal."""
        try:
            os.write(self._wake_w, b"w")
        except OSError:  # it is full, so it wakes anyway; or closed, and nobody is there to wake
            pass

    def refuse(self, busy: Set[FrontendConnection]) -> None:
        """Refuse everything new in such a way that a sender knows, and take what was sent.

        So a request is either taken and answered, or its frontend has seen that it was not
        and sends it to another executor. `busy` are connections with a request that has been
        taken and not answered: they are refused with the last answer.
        """
        self.closed = True
        transport.refuse(self._listener)
        while self._accept() is not None:
            continue
        self._epoll.unregister(self._listener.fileno())
        for channel in list(self._strangers.values()):
            channel.refuse()
            self._greet(channel)
        for connection in list(self._connections.values()):
            if connection not in busy:
                self._refuse(connection)
        self._lanes.refuse()

    def _refuse(self, connection: FrontendConnection) -> None:
        """Take no more requests on a channel than have been sent on it already."""
        if connection.refusing:
            return
        connection.refusing = True
        connection.channel.refuse()
        self._epoll.unregister(connection.fd)  # it would report its end all the time
        if connection.backlog:
            self._await_room(connection)
        self._read(connection)

    def end_late_streams(self) -> None:
        """Of lanes: a frontend itself gives up what takes too long."""
        self._lanes.end_late()

    def stream_begun(self, connection: FrontendConnection, number: int) -> None:
        """The model has a request that is answered by a stream."""
        if isinstance(connection, Lane):
            connection.running.add(number)

    def stream_ended(self, connection: FrontendConnection, number: int) -> None:
        """It has sent all that it will."""
        if isinstance(connection, Lane):
            self._lanes.stream_ended(connection, number)

    @property
    def settled(self) -> bool:
        """Whether everything that came has been told, and every answer has gone."""
        if self._events or not self._lanes.settled:
            return False
        return not any(c.backlog for c in self._connections.values())

    def disconnect(self) -> None:
        """Close all channels: frontends see EOF."""
        for connection in list(self._connections.values()):
            self._close(connection)
        for channel in self._strangers.values():
            channel.close()
        self._strangers.clear()
        self._lanes.close()

    def close(self) -> None:
        """Close everything that is open here."""
        self.disconnect()
        self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # ----------------------------------------------------------------- input

    def wait(self, timeout_s: float) -> None:
        """Wait for something to come, at most so long to the microsecond; `receive` rounds up to
        milliseconds."""
        if self._events:
            return
        try:
            select.select([self._epoll], [], [], timeout_s)
        except ValueError:  # its descriptor is too high for that
            self._epoll.poll(timeout_s)

    def receive(self, timeout_s: float) -> list[Event]:
        """What has come; waits for it at most so long. One message of a channel is read: of
        those behind it epoll tells the next time."""
        found = self._epoll.poll(0 if self._events else timeout_s)
        self.quiet = not found
        for fd, mask in found:
            connection = self._connections.get(fd)
            if connection is None:
                if not self._lanes.ready(fd, mask):
                    self._ready(fd)
                continue
            if mask & select.EPOLLOUT:
                self._send_backlog(connection)
            if mask & ~select.EPOLLOUT and not connection.closed:
                self._read(connection)
        if self._lanes.stalled:
            self._lanes.turn()
        events, self._events = self._events, []
        return events

    def _told(self, event: Event) -> None:
        self._events.append(event)

    def _ready(self, fd: int) -> None:
        if fd in self._strangers:
            self._let_in(self._strangers[fd])
        elif fd == self._wake_r:
            try:
                os.read(fd, 64)
            except BlockingIOError:
                pass
            self._lanes.turn()
        elif fd == self._listener.fileno():
            while (channel := self._accept()) is not None:
                self._let_in(channel)

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

    def _let_in(self, channel: Channel) -> None:
        """Greet, and take what came with the hello: a first request waits like any other, so
        that it can share a batch with, or go before, those of channels that were there."""
        self._greet(channel)
        connection = self._connections.get(channel.fileno())
        if connection is not None:
            self._read(connection)

    def _greet(self, channel: Channel) -> None:
        """A channel's first message: it is a frontend's from then on."""
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
            self._welcome(channel, hello)
        except (PeerDied, ProtocolViolation, OSError) as ex:
            if not isinstance(ex, PeerDied):
                log.warning("closing a channel of pid %d: %s", channel.peer_pid, ex)
            self._strangers.pop(channel.fileno(), None)
            self._epoll.unregister(channel.fileno())
            channel.close()

    def _welcome(self, channel: Channel, hello: FrontendHello) -> None:
        fd = self.status.segment.reader_fd()
        try:
            channel.send(self._hello, [fd])
        finally:
            os.close(fd)
        key = (hello.process, channel.peer_pid)
        frontend = self._frontends.setdefault(key, FrontendProcess(hello.process, self._mappings))
        connection = FrontendConnection(channel, frontend)
        frontend.connections.add(connection)
        self._connections[connection.fd] = connection
        del self._strangers[connection.fd]

    def _read(self, connection: FrontendConnection) -> None:
        """Take in a message, and whatever is behind one that has waited: only that can be
        cancelled already. All there are, where no more can come."""
        frontend, behind = connection.frontend, True
        try:
            while behind and (received := connection.channel.receive_within()) is not None:
                data, fds = received
                message = messages.decode_to_executor(data)
                behind = connection.refusing
                if type(message) is Execute:
                    if message.offers or fds:
                        frontend.segments.accept(message.offers, fds)
                    if message.dropped:
                        frontend.segments.drop(message.dropped)
                    if message.release:
                        self._release(frontend, message.release)
                    self._events.append((connection, message))
                    behind = behind or time.monotonic_ns() - message.sent_ns >= _FRESH_NS
                    continue
                close_all(fds)
                if isinstance(message, FrontendHello):
                    raise ProtocolViolation("a second hello")
                if not isinstance(message, Cancel):
                    self._release(frontend, message.slots)
                if not isinstance(message, Release):
                    self._events.append((connection, message))
                elif frontend.freed:  # it has no request whose answer could tell it
                    self.send(connection, Answer(0), [])
        except PeerDied:
            if not connection.refusing:  # else it is our own doing
                self._close(connection)
        except UnreadableMessage as ex:
            close_all(fds)
            self.expel(connection, f"unreadable message: {ex}")
        except ProtocolViolation as ex:
            self.expel(connection, str(ex))

    def expel(self, connection: FrontendConnection, why: str) -> None:
        """Close the channel of a frontend that breaks the protocol."""
        log.warning("closing a channel of pid %d: %s", connection.channel.peer_pid, why)
        if isinstance(connection, Lane):
            self._lanes.close_lane(connection)
        else:
            self._close(connection)

    def _close(self, connection: FrontendConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        del self._connections[connection.fd]
        if not connection.refusing or connection.backlog:
            self._epoll.unregister(connection.fd)
        connection.channel.close()
        while connection.backlog:
            close_all(connection.backlog.popleft()[1])
        self._events.append((connection, None))
        frontend = connection.frontend
        frontend.connections.discard(connection)
        if not frontend.connections:
            frontend.close(self._memory)
            del self._frontends[frontend.name, connection.channel.peer_pid]

    def _release(self, frontend: FrontendProcess, slots: Iterable[tuple[int, int]]) -> None:
        """A frontend is done with output slots; what it does not hold it cannot release."""
        held = frontend.held
        for lease in slots:
            if lease in held:
                held[lease] -= 1
                if not held[lease]:
                    del held[lease]
                self._memory.release(*lease)

    # ---------------------------------------------------------------- output

    def send(self, connection: FrontendConnection, answer: Answer, segments: list[int]) -> None:
        """Send an answer that names these segments of ours."""
        if isinstance(connection, Lane):
            self._lanes.send(connection, answer)
            return
        frontend = connection.frontend
        if connection.closed:  # while the model ran
            self._release(frontend, leases(answer.outputs))
            return
        if self.closed and answer.final:  # the channel is idle once the answer is there
            self._refuse(connection)
        fds: list[int] = []
        try:
            is_known = connection.known.issuperset(segments)
            if not is_known or connection.drops != self._memory.drops or frontend.freed:
                offers, fds = self._memory.offers(set(segments), connection.known)
                connection.drops = self._memory.drops
                answer = msgspec.structs.replace(
                    answer,
                    offers=tuple(offers),
                    dropped=answer.dropped + self._memory.dropped(connection.known),
                    freed=answer.freed or frontend.take_freed(),
                )
            data = messages.encode(answer)
            if connection.backlog:
                if len(data) > transport.MAX_MESSAGE:
                    raise transport.too_large(data)
            elif connection.channel.send(data, fds, wait=False):
                return
            else:
                self._await_room(connection)
            connection.backlog.append((data, [os.dup(fd) for fd in fds]))
        except (PeerDied, OSError):  # of the latter: no descriptor is left to keep it with
            self._close(connection)
            self._release(frontend, leases(answer.outputs))
        except ShmserveError as ex:  # too long to send: tell that instead
            self._release(frontend, leases(answer.outputs))
            connection.known.difference_update(segments)
            self.send(connection, _failed(answer, ex), [])
        finally:
            if fds:
                close_all(fds)

    def _await_room(self, connection: FrontendConnection) -> None:
        if connection.refusing:
            self._epoll.register(connection.fd, select.EPOLLOUT)
        else:
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _send_backlog(self, connection: FrontendConnection) -> None:
        backlog = connection.backlog
        try:
            while backlog and connection.channel.send(*backlog[0], wait=False):
                close_all(backlog.popleft()[1])
        except PeerDied:
            self._close(connection)
            return
        if not backlog and connection.refusing:
            self._epoll.unregister(connection.fd)
        elif not backlog:
            self._epoll.modify(connection.fd, select.EPOLLIN)


def _failed(answer: Answer, error: ShmserveError) -> Answer:
    return msgspec.structs.replace(
        answer, outputs=(), parameters={}, error_code=error.code, error=error.message, offers=()
    )
