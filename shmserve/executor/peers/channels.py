"""An executor's channels to its peers, of which there are two kinds: frontends and lanes.

Channels let in, read, send, keep what a peer has no room for, refuse and close, for both kinds
alike. Frontends speak `data_messages`, which are the loop's own, and are trusted with slots. Lanes
speak `lane_messages`, which `LanePeers` checks and translates. A peer that breaks its protocol
loses its channel and nothing else happens. The loop asks what has come, and sends answers. Methods
are for one thread at a time, but for those that say otherwise.

An executor that is told to stop refuses its listener and its idle channels first
(`shutdown(SHUT_RD)`). Then it reads what had been sent, answers all of it, refuses each channel
right before its last answer, and ends. `dispatch.calls.attempt` relies on this order.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import msgspec

from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError, UnreadableMessage
from shmserve.executor.peers.doorway import Doorway
from shmserve.executor.peers.frontend_connections import Event, FrontendConnection, FrontendProcess
from shmserve.executor.peers.lane import Lane
from shmserve.executor.peers.lane_peers import LanePeers
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
from shmserve.transport import channel as transport
from shmserve.transport.channel import close_all

log = logging.getLogger(__name__)

_FRESH_NS = 1_000_000


class Channels:
    """Channels to the frontends that one listener has let in, and to offered lanes. Waits for no
    peer: an answer that a peer has no room for is kept until it has.

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
        lanes: LanePeers,
    ) -> None:
        self.closed = False
        self.quiet = True
        self.status = status
        self._memory = memory
        self._lanes = lanes
        self._connections: dict[int, FrontendConnection] = {}  # lanes as well
        self._stalled: set[Lane] = set()  # lanes that do not take their answers
        self._events: list[Event] = []  # that `receive` has not told yet
        self._inbox: deque[Callable[[], None]] = deque()  # from other threads
        self._epoll = select.epoll()
        self._doorway = Doorway(listener, hello, status, self._epoll, memory, mappings)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)

    # ------------------------------------------------------------- from any thread

    def wake(self) -> None:
        """Have `receive` return. From any thread or signal."""
        try:
            os.write(self._wake_w, b"w")
        except OSError:  # it is full, so it wakes anyway; or closed, and nobody is there to wake
            pass

    def offer_lane(self, message: LaneOffered, fd: int) -> None:
        """Let a lane in, soon; the descriptor is taken. From any thread."""
        self._later(partial(self._let_lane_in, message, fd))

    def move_lanes(self) -> None:
        """Take no more requests of lanes than have been sent, as another executor serves lanes from
        now on. From any thread."""
        self._later(self._leave_lanes)

    def introduce_lanes(self) -> None:
        """Tell a coordinator that knows nothing of the lanes. From any thread."""
        self._later(self._lanes.introduce)

    def _later(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.wake()

    # ------------------------------------------------------------- beginning and end

    def refuse(self, busy: Set[FrontendConnection]) -> None:
        """Refuse everything new in such a way that a sender knows, and take what was sent.

        So a request is either taken and answered, or its sender has seen that it was not
        and sends it to another executor. `busy` are connections with a request that has been
        taken and not answered: they are refused with the last answer.
        """
        self._look_up()  # a lane that was offered before is let in
        self.closed = True
        for connection in self._doorway.shut():
            self._connections[connection.fd] = connection
        for connection in list(self._connections.values()):
            if connection not in busy and not isinstance(connection, Lane):
                self._refuse(connection)
        self._leave_lanes()

    def _refuse(self, connection: FrontendConnection) -> None:
        """Take no more requests on a channel than have been sent on it already."""
        if connection.refusing:
            return
        connection.refusing = True
        connection.channel.refuse()
        self._watch(connection)
        if isinstance(connection, Lane):
            self._read_lane(connection)
        else:
            self._read(connection)

    def _leave_lanes(self) -> None:
        for connection in list(self._connections.values()):
            if isinstance(connection, Lane):
                self._leave(connection)

    def _leave(self, lane: Lane) -> None:
        """Refuse a lane, once no stream needs further credit. A lane ends with its last answer."""
        lane.leaving = True
        if not lane.streams_wait:
            self._refuse(lane)

    def _let_lane_in(self, message: LaneOffered, fd: int) -> None:
        lane = self._lanes.admit(message, fd, self.closed)
        if lane is not None:
            self._connections[lane.fd] = lane
            self._epoll.register(lane.fd, lane.mask)

    @property
    def settled(self) -> bool:
        """Whether everything that came has been told, and every answer has gone."""
        return not (self._events or any(c.backlog for c in self._connections.values()))

    def disconnect(self) -> None:
        """Close all channels: peers see EOF."""
        self.closed = True
        self._look_up()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._doorway.close()
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
                self._ready(fd)
                continue
            if mask & select.EPOLLOUT:
                self._send_backlog(connection)
            if connection.refusing:  # all has been read; what says otherwise is from before
                if mask & select.EPOLLHUP:
                    self._close(connection)
            elif mask & ~select.EPOLLOUT and not connection.closed:
                if isinstance(connection, Lane):
                    self._read_lane(connection)
                else:
                    self._read(connection)
        if self._stalled:
            self._look_up()
        events, self._events = self._events, []
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
                # A first request waits like any other, so that it can share a batch with, or go
                # before, those of channels that were there.
                self._read(connection)

    def _look_up(self) -> None:
        """Do what other threads want done, and give up lanes that take no answers."""
        while self._inbox:
            self._inbox.popleft()()
        for lane in self._lanes.overdue(self._stalled):
            self._close(lane)

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

    def _read_lane(self, lane: Lane) -> None:
        """Take in one message, as the sender is a stranger; all there are, where no more come."""
        behind = True
        try:
            while behind and (received := lane.channel.receive_within(0.0, 0)) is not None:
                message, refusal = self._lanes.take_in(lane, received[0])
                if message is not None:
                    self._events.append((lane, message))
                if refusal is not None:
                    self._send_to_lane(lane, refusal)
                behind = lane.refusing and not lane.closed
            self._watch(lane)
        except PeerDied:
            if lane.refusing:  # all has been read
                self._end_refused(lane)
            else:
                self._close(lane)
        except ProtocolViolation:  # not logged: a stranger could fill the log
            self._lanes.violated(lane)
            self._close(lane)

    def end_late_streams(self) -> None:
        """Cancel late streams of lanes: a frontend itself gives up what takes too long."""
        self._events += self._lanes.late()

    def stream_begun(self, connection: FrontendConnection, number: int) -> None:
        """The model has a request that is answered by a stream."""
        if isinstance(connection, Lane):
            connection.running.add(number)

    def stream_ended(self, connection: FrontendConnection, number: int) -> None:
        """It has sent all that it will."""
        if isinstance(connection, Lane):
            self._lanes.stream_ended(connection, number)

    def expel(self, connection: FrontendConnection, why: str) -> None:
        """Close the channel of a peer that breaks the protocol."""
        pid = connection.channel.peer_pid
        if isinstance(connection, Lane):
            self._lanes.violated(connection)
            pid = connection.caller.pid
        log.warning("closing a channel of pid %d: %s", pid, why)
        self._close(connection)

    def _close(self, connection: FrontendConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        del self._connections[connection.fd]
        self._epoll.unregister(connection.fd)
        connection.channel.close()
        while connection.backlog:
            close_all(connection.backlog.popleft()[1])
        self._events.append((connection, None))
        if isinstance(connection, Lane):
            self._stalled.discard(connection)
            self._lanes.ended(connection)
        elif not connection.refusing:  # else its process may still read outputs that it holds
            self._doorway.left(connection)

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

    def send(self, connection: FrontendConnection, answer: Answer, segments: Sequence[int]) -> None:
        """Send an answer that names these segments of ours."""
        if isinstance(connection, Lane):
            self._answer_lane(connection, answer)
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
            if connection.backlog or not connection.channel.send(data, fds, wait=False):
                self._keep(connection, data, fds)
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

    def _answer_lane(self, lane: Lane, answer: Answer) -> None:
        data = self._lanes.answered(lane, answer)
        if data is None:
            return
        self._send_to_lane(lane, data)
        if lane.refusing:
            self._end_refused(lane)
        elif lane.leaving and not lane.closed:
            self._leave(lane)

    def _send_to_lane(self, lane: Lane, data: bytes) -> None:
        try:
            if lane.backlog or not lane.channel.send(data, wait=False):
                self._keep(lane, data, [])
                self._lanes.stalls(lane)
                self._stalled.add(lane)
            elif lane.mask != select.EPOLLIN:
                self._watch(lane)
        except PeerDied:
            self._close(lane)

    def _end_refused(self, lane: Lane) -> None:
        if not lane.waiting and not lane.backlog:
            self._close(lane)

    def _keep(self, connection: FrontendConnection, data: bytes, fds: list[int]) -> None:
        """Keep an answer until its peer has room.

        Raises:
            TooLarge: it is too long for any message.
            OSError: no descriptor is left.
        """
        if len(data) > transport.MAX_MESSAGE:
            raise transport.too_large(data)
        connection.backlog.append((data, [os.dup(fd) for fd in fds]))
        self._watch(connection)

    def _send_backlog(self, connection: FrontendConnection) -> None:
        backlog = connection.backlog
        try:
            while backlog and connection.channel.send(*backlog[0], wait=False):
                close_all(backlog.popleft()[1])
                if isinstance(connection, Lane):
                    self._lanes.took(connection)
        except PeerDied:
            self._close(connection)
            return
        self._watch(connection)
        if isinstance(connection, Lane) and not backlog:
            self._stalled.discard(connection)
            if connection.refusing:
                self._end_refused(connection)

    def _watch(self, connection: FrontendConnection) -> None:
        """Have epoll look for what is of use now, and for room for what is kept."""
        mask = select.EPOLLIN if connection.reads else 0
        if connection.backlog:
            mask |= select.EPOLLOUT
        if mask != connection.mask and not connection.closed:
            self._epoll.modify(connection.fd, mask)
            connection.mask = mask


def _failed(answer: Answer, error: ShmserveError) -> Answer:
    return msgspec.structs.replace(
        answer, outputs=(), parameters={}, error_code=error.code, error=error.message, offers=()
    )
