"""Channels of an executor to its two kinds of peers: frontends and lanes.

`Channels` waits for both kinds. It admits frontends, reads and answers their messages, and closes
them; `LaneTraffic` does so for lanes. Frontends are trusted with slots, and send `data_messages`,
which the loop takes unchanged. Lanes send `lane_messages`, which `LanePeers` checks and
translates. A peer that breaks its protocol loses its channel, with no other effect. The loop asks
for messages and sends answers. Methods are for one thread at a time, unless they say otherwise.
"""

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set

import msgspec

from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError, UnreadableMessage
from shmserve.executor.peers.doorway import Doorway
from shmserve.executor.peers.frontend_connections import Event, FrontendConnection, Peers, sent_ns
from shmserve.executor.peers.lane import Lane
from shmserve.executor.peers.lane_peers import LanePeers
from shmserve.executor.peers.lane_traffic import LaneTraffic
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
from shmserve.protocol.control.link_messages import LaneOffered
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.status_page import StatusPage
from shmserve.transport.channel import close_all
from shmserve.transport.looking import LookingWait

log = logging.getLogger(__name__)

_FRESH_NS = 1_000_000
_MAX_TURNS = 256  # turns; a new connection takes three, and each turn accepts one connection


class Channels:
    """Channels to the frontends that a listener has admitted, and to offered lanes.

    Never waits for a peer: an answer is kept until the peer has room.

    `closed`: no new peer is admitted. `quiet`: the last `receive` found no event at all. `status`:
    status page, which frontends read.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: ExecutorHello,
        memory: ArenaMemory,
        status: StatusPage,
        mappings: Mappings,
        lanes: LanePeers,
    ) -> None:
        self.closed = False
        self.quiet = True
        self.status = status
        self._memory = memory
        self._watched = Peers()
        self._connections = self._watched.by_fd
        self._events = self._watched.events
        self._epoll = self._watched.epoll
        self._look = LookingWait(self._epoll.poll)
        self._alone = True  # the last `receive` found one peer at most
        self._lane_peers = lanes
        self._lanes = LaneTraffic(lanes, self._watched)
        self._inbox: deque[Callable[[], None]] = deque()  # actions of other threads
        greeting = messages.encode(hello)
        self._doorway = Doorway(listener, greeting, status, self._epoll, memory, mappings)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)

    # ------------------------------------------------------------- from any thread

    def wake(self) -> None:
        """Make `receive` return. From any thread or signal handler."""
        try:
            os.write(self._wake_w, b"w")
        except OSError:  # a full pipe wakes anyway; a closed pipe has no reader
            pass

    def offer_lane(self, message: LaneOffered, fd: int) -> None:
        """Admit a lane soon, and take over the descriptor. From any thread."""
        self._later(lambda: self._lanes.let_in(message, fd, self.closed))

    def move_lanes(self) -> None:
        """Take no further requests from lanes: their programs use another executor. From any
        thread."""
        self._later(self._lanes.leave_all)

    def introduce_lanes(self) -> None:
        """Tell a new coordinator of all lanes. From any thread."""
        self._later(self._lane_peers.introduce)

    def _later(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.wake()

    # ------------------------------------------------------------- beginning and end

    def refuse(self, busy: Set[FrontendConnection]) -> None:
        """Refuse all new requests in a way that the senders notice, and take the requests sent
        before.

        The listener and idle channels are refused first (`shutdown(SHUT_RD)`). Then the messages
        sent before are read. So a request is either taken and answered, or its sender sees the
        refusal and sends the request to another executor. `dispatch.calls.attempt` relies on this
        order.

        `busy`: connections with a request that is taken and not answered; refused just before the
        answer.
        """
        self._look_up()  # admit lanes that were offered before
        self.closed = True
        for connection in self._doorway.shut():
            self._connections[connection.fd] = connection
        for connection in list(self._connections.values()):
            if connection not in busy and not isinstance(connection, Lane):
                self._refuse(connection)
        self._lanes.leave_all()

    def _refuse(self, connection: FrontendConnection) -> None:
        """Take no more requests of a frontend than have been sent on a channel already."""
        if not connection.refusing:
            connection.refuse(self._epoll)
            self._read(connection)

    @property
    def settled(self) -> bool:
        """Return True if `receive` has returned every event and every answer has been sent."""
        return not (self._events or any(c.backlog for c in self._connections.values()))

    def disconnect(self) -> None:
        """Close all channels: peers see EOF."""
        self.closed = True
        self._look_up()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._doorway.close()
        self._lane_peers.close()

    def close(self) -> None:
        """Close the channels and all other descriptors."""
        self.disconnect()
        self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # ----------------------------------------------------------------- input

    def wait(self, timeout_s: float) -> None:
        """Wait for an event, at most `timeout_s` seconds, to the microsecond. `receive` rounds up
        to milliseconds."""
        if self._events:
            return
        try:
            select.select([self._epoll], [], [], timeout_s)
        except ValueError:  # the descriptor is too high for select
            self._epoll.poll(timeout_s)

    def receive_in_order(self, timeout_s: float, looks: bool = False) -> list[Event]:
        """Return events as `receive` does, in the order in which clients sent the requests.

        Needed for sequences: a client that does not wait for answers sends the requests of one
        sequence on several connections, some of which are new.
        """
        events = self.receive(timeout_s, looks)
        if any(type(message) is Execute for _, message in events):
            for _ in range(_MAX_TURNS):  # requests that were sent before have arrived by now
                events += self.receive(0)
                if self.quiet:
                    break
            self.quiet = False
        events.sort(key=sent_ns)
        return events

    def receive(self, timeout_s: float, looks: bool = False) -> list[Event]:
        """Wait at most `timeout_s` seconds and return the events. One message per channel is read:
        epoll reports the next messages in the next call. `looks`: the wait may begin with a look,
        because no other thread runs the model."""
        if looks and self._alone and not self._events:
            reported = self._look.wait(timeout_s)
        else:
            reported = self._epoll.poll(0 if self._events else timeout_s)
        self.quiet, self._alone = not reported, len(reported) < 2
        for fd, mask in reported:
            connection = self._connections.get(fd)
            if connection is None:
                self._ready(fd)
                continue
            if mask & select.EPOLLOUT:
                self._send_backlog(connection)
            if connection.refusing:  # all messages have been read; a report of input is outdated
                if mask & select.EPOLLHUP:
                    self._close(connection)
            elif mask & ~select.EPOLLOUT and not connection.closed:
                if isinstance(connection, Lane):
                    self._lanes.read(connection)
                else:
                    self._read(connection)
        if self._lanes.stalled:
            self._look_up()
        events = self._events[:]
        del self._events[:]
        return events

    def _ready(self, fd: int) -> None:
        if fd == self._wake_r:
            try:
                os.read(fd, 64)
            except BlockingIOError:
                pass
            self._look_up()
        else:
            for connection in self._doorway.ready(fd):
                self._connections[connection.fd] = connection
                # A first request waits like any other, so that it can share a batch with requests
                # of existing channels, or run before them.
                self._read(connection)

    def _look_up(self) -> None:
        """Run the actions of other threads, and close lanes that do not take their answers."""
        while self._inbox:
            self._inbox.popleft()()
        self._lanes.close_overdue()

    def _read(self, connection: FrontendConnection) -> None:
        """Read a message of a frontend. After a request that has waited, read on: a cancellation
        may be behind. On a refused channel, read to the end."""
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
                        self._release(connection, message.release)
                    self._events.append((connection, message))
                    behind = behind or time.monotonic_ns() - message.sent_ns >= _FRESH_NS
                    continue
                close_all(fds)
                if isinstance(message, FrontendHello):
                    raise ProtocolViolation("a second hello")
                if not isinstance(message, Cancel):
                    self._release(connection, message.slots)
                if not isinstance(message, Release):
                    self._events.append((connection, message))
                elif frontend.freed:  # no pending answer could carry the freed slots
                    self.send(connection, Answer(0), [])
        except PeerDied:
            if not connection.refusing:  # else the end was caused by the refusal
                self._close(connection)
        except UnreadableMessage as ex:
            close_all(fds)
            self.expel(connection, f"unreadable message: {ex}")
        except ProtocolViolation as ex:
            self.expel(connection, str(ex))

    def end_late_streams(self) -> None:
        """Cancel late streams of lanes. A frontend itself cancels its late streams."""
        self._events += self._lane_peers.late()

    def stream_begun(self, connection: FrontendConnection, number: int) -> None:
        """Note that the model has begun a request that is answered by a stream."""
        if isinstance(connection, Lane):
            connection.running.add(number)

    def stream_ended(self, connection: FrontendConnection, number: int) -> None:
        """Note that the model has sent all answers of a stream."""
        if isinstance(connection, Lane):
            self._lane_peers.stream_ended(connection, number)

    def expel(self, connection: FrontendConnection, why: str) -> None:
        """Close the channel of a peer that breaks the protocol."""
        pid = connection.channel.peer_pid
        if isinstance(connection, Lane):
            self._lane_peers.violated(connection)
            pid = connection.caller.pid
        log.warning("closing a channel of pid %d: %s", pid, why)
        self._close(connection)

    def _close(self, connection: FrontendConnection) -> None:
        if isinstance(connection, Lane):
            self._lanes.close(connection)
        elif self._watched.close(connection) and not connection.refusing:
            # The process of a refused connection may still read outputs.
            self._doorway.left(connection)

    def _release(self, peer: FrontendConnection, slots: Iterable[tuple[int, int]]) -> None:
        """Release output slots that a frontend has read. Slots that the frontend does not hold are
        ignored."""
        held = peer.frontend.held
        for lease in slots:
            if lease in held:
                held[lease] -= 1
                if not held[lease]:
                    del held[lease]
                self._memory.release(*lease)

    # ---------------------------------------------------------------- output

    def send(self, connection: FrontendConnection, answer: Answer, segments: Sequence[int]) -> None:
        """Send an answer whose outputs lie in these segments of the executor."""
        if isinstance(connection, Lane):
            self._lanes.answer(connection, answer)
            return
        frontend = connection.frontend
        if connection.closed:  # closed while the model ran
            self._release(connection, leases(answer.outputs))
            return
        if self.closed and answer.final:  # the channel is idle once the answer has arrived
            self._refuse(connection)
        fds: list[int] = []
        try:
            is_known = connection.known.issuperset(segments)
            if not is_known or connection.drops != self._memory.drops or frontend.freed:
                answer, fds = connection.with_news(answer, segments, self._memory)
            data = messages.encode(answer)
            if connection.backlog or not connection.channel.send(data, fds, wait=False):
                connection.keep(self._epoll, data, fds)
        except (PeerDied, OSError):  # OSError: no descriptor is left to keep the answer with
            self._close(connection)
            self._release(connection, leases(answer.outputs))
        except ShmserveError as ex:  # the answer is too long: send the error instead
            self._release(connection, leases(answer.outputs))
            connection.known.difference_update(segments)
            self.send(connection, _failed(answer, ex), [])
        finally:
            if fds:
                close_all(fds)

    def _send_backlog(self, connection: FrontendConnection) -> None:
        try:
            connection.send_backlog()
        except PeerDied:
            self._close(connection)
            return
        connection.watch(self._epoll)
        if isinstance(connection, Lane) and not connection.backlog:
            self._lanes.backlog_sent(connection)


def _failed(answer: Answer, error: ShmserveError) -> Answer:
    return msgspec.structs.replace(
        answer, outputs=(), parameters={}, error_code=error.code, error=error.message, offers=()
    )
