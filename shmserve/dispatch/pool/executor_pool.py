"""Executor pool: one executor process as seen by a frontend, with connections, segments and slots
held by the executor.

A connection is a data channel with at most one request in flight, taken from the pool like a
database connection. When an executor dies, all slots held by the executor come back.

A frontend sends hello and first request together. So an executor that is busy for long cannot
delay a frontend beyond the request's deadline.
"""

import select
import threading

import msgspec
from msgspec import Struct, field

from shmserve import errors, ids
from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.core.registry import LiveInstance
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.rest import Rest
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Descriptor,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
    SegmentOffer,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.peer_segments import PeerSegments
from shmserve.shm.status_page import StatusView
from shmserve.transport.channel import Channel, close_all

_CONNECT_TIMEOUT_S = 2.0
_RELEASE_LATER = 1 << 20  # fewer bytes wait for the next request, or for a second
_MANY_RELEASES = 256  # fewer slots wait as well
_MOST_RELEASES = 1024  # in one message


class ExecutorPool(Struct, eq=False):
    """Connections to one executor, for the executor's lifetime. Thread-safe.

    Args:
        process: process id of this frontend.
        limit: most requests at the executor at a time.
        rest: rest of the thread that calls `flush`.

    Attributes:
        by_caller: number of requests in flight for each known caller.
    """

    instance: LiveInstance
    _path: str
    _process: str
    _memory: ArenaMemory
    _limit: int
    _rest: Rest
    segments: PeerSegments = field(
        default_factory=lambda: PeerSegments(keep=True)
    )  # outputs may be passed on to other executors
    in_flight: int = 0
    by_caller: dict[int, int] = {}
    _idle: list[ExecutorConnection] = []
    _releasing: int = 0  # idle connections that `release` sends on
    _pending: list[tuple[int, int]] = []  # output slots to release
    _pending_bytes: int = 0
    _retained: set[tuple[int, int]] = set()  # our slots that the model still holds
    _let_go: set[tuple[int, int]] = set()  # freed before we knew of the retention
    _control: ExecutorConnection | None = None  # for messages outside of requests
    known_status: StatusView | None = None  # set by the first hello
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    @property
    def load(self) -> int:
        """Requests waiting or running at the executor, as far as visible from this process."""
        depth = self.known_status.depth if self.known_status is not None else 0
        return max(depth, self.in_flight)

    def status(self) -> StatusView | None:
        """Return the executor's status page, waiting for the hello if needed. Return None if the
        hello has not come in time. Raise QueueFull if `max_queue` requests of this frontend are at
        the executor already. Raise PeerDied or ProtocolViolation if the executor cannot be
        reached."""
        if self.known_status is not None:
            return self.known_status
        connection = self.acquire()
        try:
            received = connection.channel.receive_within(_CONNECT_TIMEOUT_S)
            if received is not None:
                self.take(connection, *received)
        except BaseException:
            self.discard(connection)
            raise
        self.give(connection)
        return self.known_status

    def acquire(self, caller: int = UNKNOWN_CALLER) -> ExecutorConnection:
        """Return a connection for one request of a caller. Hand the connection to `give` or
        `discard` afterwards. Raise QueueFull if `max_queue` requests of this frontend are at the
        executor already, PeerDied if the executor cannot be reached."""
        with self._lock:
            if self._closed:
                raise errors.PeerDied("the executor is gone")
            if self.in_flight >= self._limit:
                model, _ = ids.instance_model(self.instance.name)
                raise errors.QueueFull(
                    f"the queue of model '{model}' is full: {self._limit} requests for one"
                    " instance wait or run already (max_queue)"
                )
            self.in_flight += 1
            if caller:
                self.by_caller[caller] = self.by_caller.get(caller, 0) + 1
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            try:
                connection = self._connect()
            except BaseException:
                with self._lock:
                    self.in_flight -= 1
                    if caller and (remaining := self.by_caller.pop(caller) - 1):
                        self.by_caller[caller] = remaining
                raise
        connection.caller = caller
        return connection

    def _connect(self) -> ExecutorConnection:
        """Return a new connection without waiting for the executor's hello, which precedes the
        first answer. A model that runs for long would delay the hello beyond any deadline."""
        channel = Channel.connect(self._path, _CONNECT_TIMEOUT_S)
        try:
            channel.send(messages.encode(FrontendHello(messages.VERSION, self._process)))
        except errors.PeerDied:
            channel.close()
            raise
        return ExecutorConnection(channel)

    def send(self, connection: ExecutorConnection, request: Execute) -> None:
        """Send a request, with descriptors of segments new to the executor and with slots to
        release. Raise PeerDied if the request was not received. Raise TooLarge if the request's
        names and parameters are too long to pass on; nothing was sent."""
        memory, known = self._memory, connection.known
        offers: list[SegmentOffer] = []
        fds: list[int] = []
        for tensor in request.inputs:
            if type(at := tensor.at) is Descriptor and at.segment not in known:
                offers, fds = memory.offers(_segments_of(request), known)
                break
        release: list[tuple[int, int]] = []
        if self._pending and connection.welcomed:
            with self._lock:
                release = self._take_pending()
        dropped: tuple[int, ...] = ()
        if connection.drops != memory.drops:
            dropped = connection.forget_dropped(memory)
        try:
            if offers or release or dropped:
                request = msgspec.structs.replace(
                    request, release=tuple(release), offers=tuple(offers), dropped=dropped
                )
            connection.channel.send(messages.encode(request), fds)
        except BaseException:
            known.difference_update([offer.segment for offer in offers])
            known.update(dropped)
            connection.drops = -1  # the next request tells of `dropped`
            with self._lock:
                self._pending += release
            raise
        finally:
            if fds:
                close_all(fds)

    def take(
        self, connection: ExecutorConnection, data: memoryview, fds: list[int]
    ) -> Answer | None:
        """Read a message of a connection. Return the answer to a request, or None for a hello or
        news of slots. Raise ProtocolViolation for any other message."""
        connection.welcomed = True
        try:
            message: messages.ToFrontend = messages.decode_to_frontend(data)
        except errors.UnreadableMessage:
            close_all(fds)
            raise
        if type(message) is not Answer:
            self._welcome(message, fds)
            return None
        if message.offers or fds:
            self.segments.accept(message.offers, fds)
        if message.dropped:
            self.segments.drop(message.dropped)
        if message.freed:
            self._freed(message.freed)
        return message if message.request else None

    def _welcome(self, hello: ExecutorHello, fds: list[int]) -> None:
        try:
            if hello.version != messages.VERSION or len(fds) != 1:
                raise errors.ProtocolViolation("the executor speaks another version")
            if self.known_status is None:
                self.known_status = StatusView(fds[0])
        except OSError as ex:
            raise errors.ProtocolViolation("the executor's status page cannot be mapped") from ex
        finally:
            close_all(fds)

    def give(self, connection: ExecutorConnection, usable: bool = True) -> None:
        """Take back a connection after its request was answered. With `usable` false, close the
        connection."""
        caller = connection.caller
        with self._lock:
            self.in_flight -= 1
            if caller and (remaining := self.by_caller.pop(caller) - 1):
                self.by_caller[caller] = remaining
            if usable and not self._closed:
                self._idle.append(connection)
                return
        connection.channel.close()

    def discard(self, connection: ExecutorConnection) -> None:
        """Take back and close an unusable connection."""
        self.give(connection, usable=False)

    def release(self, slots: list[tuple[int, int]], nbytes: int) -> None:
        """Release output slots of `nbytes` bytes in total. Never waits: the executor is told with
        the next request, or at once on an idle connection if slots or bytes are many."""
        with self._lock:
            self._pending += slots
            self._pending_bytes += nbytes
            if self._rest.resting:
                self._rest.end()
            many = len(self._pending) >= _MANY_RELEASES
            if not (many or self._pending_bytes > _RELEASE_LATER):
                return
            if not (self._idle and self._idle[-1].welcomed):
                return
            connection = self._idle.pop()
            self._releasing += 1
        usable = True
        try:
            self._send_pending(connection.channel)
        except errors.PeerDied:  # a dead executor gives all slots back; the next request notices
            usable = False
        finally:
            with self._lock:
                self._releasing -= 1
                usable = usable and not self._closed
                if usable:
                    self._idle.append(connection)
        if not usable:
            connection.channel.close()

    @property
    def has_releases(self) -> bool:
        """True if slots wait for release."""
        return bool(self._pending)

    def take_releases(self, nbytes: int) -> list[tuple[int, int]]:
        """Return slots to release, for the caller to send. Return [] if they hold fewer than
        `nbytes` bytes."""
        with self._lock:
            return self._take_pending() if self._pending_bytes >= nbytes else []

    def _take_pending(self) -> list[tuple[int, int]]:
        """Return as many releases as fit into one message. Call with the lock held."""
        slots, self._pending = self._pending[:_MOST_RELEASES], self._pending[_MOST_RELEASES:]
        self._pending_bytes = 0
        return slots

    def _send_pending(self, channel: Channel) -> None:
        """Send waiting releases until the executor's buffer is full."""
        while True:
            with self._lock:
                slots = self._take_pending()
            sent = False
            try:
                sent = channel.send(messages.encode(Release(tuple(slots))), wait=False)
            finally:
                if not sent:
                    with self._lock:
                        self._pending += slots
            if not (sent and self._pending):
                return

    def flush(self) -> None:
        """Send releases that no request took along, and read news of slots that the model has let
        go of. A dead executor needs no releases. For the maintenance thread: may wait while
        connecting, but never holds the lock for admitting requests meanwhile."""
        with self._lock:
            if self._closed or not (self._pending or self._retained):
                return
            # taken out, so no other thread closes the connection
            control, self._control = self._control, None
        try:
            control = control or self._connect()
            while (received := control.channel.receive_within()) is not None:
                self.take(control, *received)
            if control.welcomed:  # else the next flush sends
                self._send_pending(control.channel)
        except (errors.PeerDied, errors.ProtocolViolation):  # a dead executor gives all slots back
            if control is not None:
                control.channel.close()
            return
        with self._lock:
            if not self._closed and self._control is None:
                self._control = control
                return
        control.channel.close()

    def retain(self, slots: list[tuple[int, int]]) -> None:
        """Note that the executor's model still holds these slots of ours."""
        with self._lock:
            gone = slots if self._closed else [slot for slot in slots if slot in self._let_go]
            self._let_go.difference_update(gone)
            self._retained.update(slot for slot in slots if slot not in gone)
        self._give_back(gone)

    def _freed(self, slots: tuple[tuple[int, int], ...]) -> None:
        """Take back slots that the model has let go of. A model may let go at any time, and
        another connection may bring the news before the answer that reports the retention."""
        with self._lock:
            mine = [slot for slot in slots if slot in self._retained]
            self._retained.difference_update(mine)
            self._let_go.update(slot for slot in slots if slot not in mine)
        self._give_back(mine)

    def _give_back(self, slots: list[tuple[int, int]]) -> None:
        for number, generation in slots:
            try:
                self._memory.release(number, generation)
            except errors.StaleDescriptor:
                continue

    def close(self) -> None:
        """Close idle connections, and take back slots held by the executor."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections, self._idle = self._idle, []
            if self._control is not None:
                connections.append(self._control)
            retained, self._retained = list(self._retained), set()
        for connection in connections:
            connection.channel.close()
        self._give_back(retained)

    @property
    def over(self) -> bool:
        """True if no request is in flight and the executor has ended, so `close` loses nothing.
        The executor counts as ended if all of the pool's connections are closed. A living
        executor would use output slots again while calls and steps of ensembles still read, and
        the model may still hold our inputs."""
        with self._lock:
            if self.in_flight or self._releasing:
                return False
            control = [self._control] if self._control is not None else []
            connections = [*self._idle, *control]
            poll = select.poll()
            for connection in connections:
                poll.register(connection.channel.fileno(), 0)
            ended = sum(bool(events & select.POLLHUP) for _, events in poll.poll(0))
            return ended == len(connections)


def _segments_of(request: Execute) -> set[int]:
    """Return the segments of our arena that hold inputs of the request."""
    return {t.at.segment for t in request.inputs if isinstance(t.at, Descriptor)}
