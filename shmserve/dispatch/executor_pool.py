"""One executor process as a frontend sees it: its lanes, its memory, what it holds of ours.

A *lane* is a data channel with at most one request in flight, taken from this pool
as a database connection is. Everything a peer holds comes back when it dies.
"""

from __future__ import annotations

import os
import select
import threading

import msgspec
from msgspec import DecodeError

from shmserve.core.registry import LiveInstance
from shmserve.errors import PeerDied, ProtocolViolation, QueueFull, StaleDescriptor, TooLarge
from shmserve.protocol import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Descriptor,
    Execute,
    ExecutorHello,
    FrontendHello,
    Release,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.peer_segments import PeerSegments
from shmserve.shm.status_page import StatusView
from shmserve.transport.channel import Channel

_CONNECT_TIMEOUT_S = 2.0
RELEASE_AT_ONCE = 64 * 1024  # bytes; smaller outputs are released with the next request


class Lane:
    """A channel, which of our segments were already offered on it, and as of when (`drops`)."""

    __slots__ = ("channel", "drops", "known")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.known: set[int] = set()
        self.drops = 0


class Peer:
    """One life of one executor."""

    def __init__(
        self,
        instance: LiveInstance,
        path: str,
        process: str,
        memory: ArenaMemory,
        limit: int,
        keep: bool = False,
    ) -> None:
        self.instance = instance
        self.segments = PeerSegments(keep)  # keep: to pass them on to other executors
        self.in_flight = 0
        self._path = path
        self._process = process
        self._memory = memory
        self._limit = limit
        self._idle: list[Lane] = []
        self._pending: list[tuple[int, int]] = []  # output slots to release, small ones
        self._retained: set[tuple[int, int]] = set()  # our slots that its model still holds
        self._let_go: set[tuple[int, int]] = set()  # freed before we knew them as retained
        self._control: Lane | None = None  # for releases that cannot wait for a request
        self._status: StatusView | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def load(self) -> int:
        """Requests that wait for or run on it, as far as one can see from here."""
        depth = self._status.depth if self._status is not None else 0
        return max(depth, self.in_flight)

    def acquire(self) -> Lane:
        """A lane for one request; give it back with `give`, or `discard` it.

        Raises:
            QueueFull: `max_queue` requests of this frontend are with it already.
            PeerDied: it cannot be reached.
        """
        with self._lock:
            if self._closed:
                raise PeerDied("the executor is gone")
            if self.in_flight >= self._limit:
                raise QueueFull("the queue of the model is full (max_queue)")
            self.in_flight += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except PeerDied:
            with self._lock:
                self.in_flight -= 1
            raise

    def _connect(self) -> Lane:
        """A new lane. The executor's hello comes ahead of its first answer: a model that
        runs for long would keep us waiting for it beyond any deadline."""
        channel = Channel.connect(self._path, _CONNECT_TIMEOUT_S)
        try:
            channel.send(messages.encode(FrontendHello(messages.VERSION, self._process)))
        except PeerDied:
            channel.close()
            raise
        return Lane(channel)

    def take(self, data: memoryview, fds: list[int]) -> Answer | None:
        """Read a message of a lane: an answer, or None if it was only the hello.

        Raises:
            ProtocolViolation: anything else.
        """
        try:
            message: messages.ToFrontend = messages.decode_to_frontend(data)
        except DecodeError as ex:
            _close(fds)
            raise ProtocolViolation("an answer that cannot be read") from ex
        if isinstance(message, ExecutorHello):
            self._welcome(message, fds)
            return None
        if message.offers or fds:
            self.segments.accept(message.offers, fds)
        if message.dropped:
            self.segments.drop(message.dropped)
        if message.freed:
            self._freed(message.freed)
        return message

    def _welcome(self, hello: ExecutorHello, fds: list[int]) -> None:
        try:
            if hello.version != messages.VERSION or len(fds) != 1:
                raise ProtocolViolation("the executor speaks another version")
            if self._status is None:
                self._status = StatusView(fds[0])
        except OSError as ex:
            raise ProtocolViolation("the executor's status page cannot be mapped") from ex
        finally:
            _close(fds)

    def give(self, lane: Lane) -> None:
        """A lane whose request was answered comes back."""
        with self._lock:
            self.in_flight -= 1
            if not self._closed:
                self._idle.append(lane)
                return
        lane.channel.close()

    def discard(self, lane: Lane) -> None:
        """A lane that is of no use any more."""
        with self._lock:
            self.in_flight -= 1
        lane.channel.close()

    def release(self, slots: list[tuple[int, int]], nbytes: int) -> None:
        """We are done with output slots of `nbytes` bytes in total."""
        with self._lock:
            self._pending.extend(slots)
            if nbytes < RELEASE_AT_ONCE and len(self._pending) < 256:
                return
        self.flush()

    def take_pending(self) -> tuple[tuple[int, int], ...]:
        """Releases to send along with a request."""
        if not self._pending:
            return ()
        with self._lock:
            slots, self._pending = self._pending, []
        return tuple(slots)

    def flush(self) -> None:
        """Send releases that found no request to ride on, and hear which of our slots its
        model has let go of. A dead peer needs none."""
        with self._lock:
            if self._closed or not (self._pending or self._retained):
                return
            slots, self._pending = self._pending, []
            try:
                if self._control is None:
                    self._control = self._connect()
                channel = self._control.channel
                for start in range(0, max(len(slots), 1), 1024):
                    part = tuple(slots[start : start + 1024])
                    channel.send(messages.encode(Release(part)))
                freed = self._told(channel)
            except (PeerDied, ProtocolViolation):
                return  # its death gives everything back
        self._freed(freed)

    def _told(self, channel: Channel) -> tuple[tuple[int, int], ...]:
        """What came on the control lane since: the hello, and answers to nothing but `freed`."""
        freed: list[tuple[int, int]] = []
        while (received := channel.receive_now()) is not None:
            data, fds = received
            _close(fds)
            try:
                message: messages.ToFrontend = messages.decode_to_frontend(data)
            except DecodeError as ex:
                raise ProtocolViolation("an answer that cannot be read") from ex
            if isinstance(message, Answer):
                freed += message.freed
        return tuple(freed)

    def retain(self, slots: list[tuple[int, int]]) -> None:
        """The executor's model still holds these slots of ours."""
        with self._lock:
            gone = slots if self._closed else [slot for slot in slots if slot in self._let_go]
            self._let_go.difference_update(gone)
            self._retained.update(slot for slot in slots if slot not in gone)
        self._give_back(gone)

    def _freed(self, slots: tuple[tuple[int, int], ...]) -> None:
        """The model has let go of retained slots, or of some we shall hear of presently: it
        may do so at any time, and other lanes may bring the news first."""
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
        """It is gone or not wanted any more: close idle lanes, take back what it held."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lanes, self._idle = self._idle, []
            if self._control is not None:
                lanes.append(self._control)
            retained, self._retained = list(self._retained), set()
        for lane in lanes:
            lane.channel.close()
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
            lanes = [*self._idle, *([self._control] if self._control is not None else [])]
            poll = select.poll()
            for lane in lanes:
                poll.register(lane.channel.fileno(), 0)
            return not lanes or any(events & select.POLLHUP for _, events in poll.poll(0))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def wire_execute(peer: Peer, lane: Lane, memory: ArenaMemory, request: Execute) -> None:
    """Send a request on a lane, with fds of segments the peer does not know yet.

    Raises:
        PeerDied: it was not taken.
        TooLarge: its names and parameters are too long to pass on; nothing was sent.
    """
    needed = {t.at.segment for t in request.inputs if isinstance(t.at, Descriptor)}
    offers, fds = memory.offers(needed, lane.known) if needed - lane.known else ((), [])
    pending = peer.take_pending()
    dropped: tuple[int, ...] = ()
    if lane.drops != memory.drops:
        lane.drops = memory.drops
        dropped = memory.dropped(lane.known)
    if offers or pending or dropped:
        request = msgspec.structs.replace(
            request, release=pending, offers=tuple(offers), dropped=dropped
        )
    try:
        lane.channel.send(messages.encode(request), fds)
    except TooLarge:
        peer.release(list(pending), 0)
        raise
    finally:
        _close(fds)
