"""One executor process as a frontend sees it: its connections, its memory, what it holds of ours.

A connection is a data channel with at most one request in flight, taken from this pool as a
database connection is. Everything an executor holds comes back when it dies.

A frontend sends hello and first request together. An executor that is busy for long thus cannot
hold a frontend beyond its deadline.
"""

from __future__ import annotations

import select
import threading

import msgspec

from shmserve import ids
from shmserve.core.registry import LiveInstance
from shmserve.core.scheduling.caller_number import UNKNOWN
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.rest import Rest
from shmserve.errors import (
    PeerDied,
    ProtocolViolation,
    QueueFull,
    StaleDescriptor,
    TooLarge,
    UnreadableMessage,
)
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
_RELEASE_LATER = 1 << 20  # bytes, or less, are released with the next request, or within a second
_MANY_RELEASES = 256  # the same for their number
_MOST_RELEASES = 1024  # in one message


class ExecutorPool:
    """One life of one executor. For any thread.

    Args:
        process: what this process is called.
        limit: requests that may be with the executor at a time.
        rest: of the thread that calls `flush`.

    Attributes:
        by_caller: how many there are of each caller that is known.
    """

    def __init__(
        self,
        instance: LiveInstance,
        path: str,
        process: str,
        memory: ArenaMemory,
        limit: int,
        rest: Rest,
    ) -> None:
        self.instance = instance
        self.segments = PeerSegments(keep=True)  # its outputs may be passed on to other executors
        self.in_flight = 0
        self.by_caller: dict[int, int] = {}
        self._path = path
        self._process = process
        self._memory = memory
        self._limit = limit
        self._rest = rest
        self._idle: list[ExecutorConnection] = []
        self._pending: list[tuple[int, int]] = []  # output slots to release
        self._pending_bytes = 0
        self._retained: set[tuple[int, int]] = set()  # our slots that its model still holds
        self._let_go: set[tuple[int, int]] = set()  # freed before we knew them as retained
        self._control: ExecutorConnection | None = None  # for what finds no request to ride on
        self.known_status: StatusView | None = None  # since its first hello
        self._lock = threading.Lock()
        self._closed = False

    @property
    def load(self) -> int:
        """Requests that wait for or run on it, as far as one can see from here."""
        depth = self.known_status.depth if self.known_status is not None else 0
        return max(depth, self.in_flight)

    def status(self) -> StatusView | None:
        """What it publishes, for which its hello is waited for; None: it has not come in time.

        Raises:
            QueueFull: `max_queue` requests of this frontend are with it already.
            PeerDied, ProtocolViolation: it cannot be reached.
        """
        if self.known_status is not None:
            return self.known_status
        connection = self.acquire()
        try:
            received = connection.channel.receive_within(_CONNECT_TIMEOUT_S)
            if received is not None:
                self.take(*received)
        except BaseException:
            self.discard(connection)
            raise
        self.give(connection)
        return self.known_status

    def acquire(self, caller: int = UNKNOWN) -> ExecutorConnection:
        """A connection for one request of a caller; give it back with `give`, or `discard` it.

        Raises:
            QueueFull: `max_queue` requests of this frontend are with it already.
            PeerDied: it cannot be reached.
        """
        with self._lock:
            if self._closed:
                raise PeerDied("the executor is gone")
            if self.in_flight >= self._limit:
                model, _ = ids.instance_model(self.instance.name)
                raise QueueFull(
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
                    if caller and (left := self.by_caller.pop(caller) - 1):
                        self.by_caller[caller] = left
                raise
        connection.caller = caller
        return connection

    def _connect(self) -> ExecutorConnection:
        """A new connection. The executor's hello comes ahead of its first answer: a model that
        runs for long would keep us waiting for it beyond any deadline."""
        channel = Channel.connect(self._path, _CONNECT_TIMEOUT_S)
        try:
            channel.send(messages.encode(FrontendHello(messages.VERSION, self._process)))
        except PeerDied:
            channel.close()
            raise
        return ExecutorConnection(channel)

    def send(self, connection: ExecutorConnection, request: Execute) -> None:
        """Send a request, with fds of our segments that the executor does not know yet, and
        with what it is to release.

        Raises:
            PeerDied: it was not taken.
            TooLarge: its names and parameters are too long to pass on; nothing was sent.
        """
        memory, known = self._memory, connection.known
        offers: list[SegmentOffer] = []
        fds: list[int] = []
        for tensor in request.inputs:
            if type(at := tensor.at) is Descriptor and at.segment not in known:
                offers, fds = memory.offers(_segments_of(request), known)
                break
        release: list[tuple[int, int]] = []
        if self._pending:
            with self._lock:
                release = self._take_pending()
        dropped: tuple[int, ...] = ()
        if connection.drops != memory.drops:
            dropped = connection.forget_dropped(memory)
        if offers or release or dropped:
            request = msgspec.structs.replace(
                request, release=tuple(release), offers=tuple(offers), dropped=dropped
            )
        try:
            connection.channel.send(messages.encode(request), fds)
        except TooLarge:
            with self._lock:
                self._pending += release
            raise
        finally:
            if fds:
                close_all(fds)

    def take(self, data: memoryview, fds: list[int]) -> Answer | None:
        """Read a message: the answer to a request, or None if it was the hello, or only news
        of slots.

        Raises:
            ProtocolViolation: anything else.
        """
        try:
            message: messages.ToFrontend = messages.decode_to_frontend(data)
        except UnreadableMessage:
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
                raise ProtocolViolation("the executor speaks another version")
            if self.known_status is None:
                self.known_status = StatusView(fds[0])
        except OSError as ex:
            raise ProtocolViolation("the executor's status page cannot be mapped") from ex
        finally:
            close_all(fds)

    def give(self, connection: ExecutorConnection, usable: bool = True) -> None:
        """A connection comes back whose request was answered, or (not `usable`) is of no use."""
        caller = connection.caller
        with self._lock:
            self.in_flight -= 1
            if caller and (left := self.by_caller.pop(caller) - 1):
                self.by_caller[caller] = left
            if usable and not self._closed:
                self._idle.append(connection)
                return
        connection.channel.close()

    def discard(self, connection: ExecutorConnection) -> None:
        """A connection that is of no use any more."""
        self.give(connection, usable=False)

    def release(self, slots: list[tuple[int, int]], nbytes: int) -> None:
        """We are done with output slots of `nbytes` bytes in total. Never waits: the executor
        is told with the next request, or, if it is much, on an idle connection now."""
        with self._lock:
            self._pending += slots
            self._pending_bytes += nbytes
            if self._rest.resting:
                self._rest.end()
            many = len(self._pending) >= _MANY_RELEASES
            if not (many or self._pending_bytes > _RELEASE_LATER) or not self._idle:
                return
            connection = self._idle.pop()
        try:
            self._send_pending(connection.channel)
        except PeerDied:  # which gives everything back; it is noticed with the next request
            connection.channel.close()
            return
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.channel.close()

    @property
    def has_releases(self) -> bool:
        """Whether something is to be released that `flush` has not sent."""
        return bool(self._pending)

    def take_releases(self, nbytes: int) -> list[tuple[int, int]]:
        """Slots to release, for the caller to send; none unless they have so many bytes."""
        with self._lock:
            return self._take_pending() if self._pending_bytes >= nbytes else []

    def _take_pending(self) -> list[tuple[int, int]]:
        """As many releases as go into one message. With the lock held."""
        slots, self._pending = self._pending[:_MOST_RELEASES], self._pending[_MOST_RELEASES:]
        self._pending_bytes = 0
        return slots

    def _send_pending(self, channel: Channel) -> None:
        """Send what is to be released as far as the executor has room for it; raises PeerDied."""
        while True:
            with self._lock:
                slots = self._take_pending()
            if not channel.send(messages.encode(Release(tuple(slots))), wait=False):
                with self._lock:
                    self._pending += slots
                return
            if not self._pending:
                return

    def flush(self) -> None:
        """Send releases that found no request to ride on, and hear which of our slots its model
        has let go of. A dead executor needs none. For the maintenance thread, since it may wait
        for a connection to be made, but never with the lock that admits requests."""
        with self._lock:
            if self._closed or not (self._pending or self._retained):
                return
            control, self._control = self._control, None  # nobody closes it meanwhile
        try:
            control = control or self._connect()
            self._send_pending(control.channel)
            while (received := control.channel.receive_within()) is not None:
                self.take(*received)
        except (PeerDied, ProtocolViolation):  # its death gives everything back
            if control is not None:
                control.channel.close()
            return
        with self._lock:
            if not self._closed and self._control is None:
                self._control = control
                return
        control.channel.close()

    def retain(self, slots: list[tuple[int, int]]) -> None:
        """The executor's model still holds these slots of ours."""
        with self._lock:
            gone = slots if self._closed else [slot for slot in slots if slot in self._let_go]
            self._let_go.difference_update(gone)
            self._retained.update(slot for slot in slots if slot not in gone)
        self._give_back(gone)

    def _freed(self, slots: tuple[tuple[int, int], ...]) -> None:
        """The model has let go of retained slots, or of some we shall hear of presently: it
        may do so at any time, and other connections may bring the news first."""
        with self._lock:
            mine = [slot for slot in slots if slot in self._retained]
            self._retained.difference_update(mine)
            self._let_go.update(slot for slot in slots if slot not in mine)
        self._give_back(mine)

    def _give_back(self, slots: list[tuple[int, int]]) -> None:
        for number, generation in slots:
            try:
                self._memory.release(number, generation)
            except StaleDescriptor:
                continue

    def close(self) -> None:
        """It is gone or not wanted any more: close idle connections, take back what it held."""
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
        """Whether nothing of ours is with it any more, or it has ended: `close` loses nothing.

        An executor that takes no more requests may still work on some, and its model may
        still hold inputs.
        """
        with self._lock:
            if self.in_flight or not self._retained:
                return not self.in_flight
            control = [self._control] if self._control is not None else []
            connections = [*self._idle, *control]
            poll = select.poll()
            for connection in connections:
                poll.register(connection.channel.fileno(), 0)
            return not connections or any(events & select.POLLHUP for _, events in poll.poll(0))


def _segments_of(request: Execute) -> set[int]:
    """Where its inputs lie in our arena."""
    return {t.at.segment for t in request.inputs if isinstance(t.at, Descriptor)}
