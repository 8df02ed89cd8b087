"""The executor's loop: take requests in, run them one after the other, answer.

One thread does everything a request needs: epoll, receive, run, send. A peer that
breaks the protocol loses its channel and nothing else happens. (Decoupled models are
served by `stream_loop`.)
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time

import msgspec
from msgspec import DecodeError

from shmserve.core.queue import RequestQueue
from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Backend
from shmserve.executor.connections import Connection, FrontendProcess
from shmserve.executor.regions import ClientRegions
from shmserve.executor.run import Runner, late
from shmserve.executor.statistics import Statistics
from shmserve.protocol import messages
from shmserve.protocol.data_messages import (
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
from shmserve.shm.status_page import StatusPage
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import channel as channels

log = logging.getLogger(__name__)

_FRESH_NS = 1_000_000
WAKE_S = 1.0  # idle work: trimming segments, noticing a stop


class Loop:
    """Serves one loaded backend on one listener until `stop` is called."""

    def __init__(
        self,
        *,
        process: str,
        instance: str,
        listener: socket.socket,
        backend: Backend,
        spec: ModelSpec,
        memory: ArenaMemory,
        status: StatusPage,
        segment_idle_s: float,
        regions: ClientRegions,
    ) -> None:
        self._hello = messages.encode(ExecutorHello(messages.VERSION, process, instance))
        self._listener = listener
        self._memory = memory
        self._status = status
        self._idle_s = segment_idle_s
        self._statistics = Statistics(status.counters, spec)
        self._devices = regions.devices
        self._runner = Runner(backend, spec, memory, regions, self._cancelled, self._following)
        self._queue: RequestQueue[tuple[int, int], tuple[Connection, Execute]] = RequestQueue()
        self._connections: dict[int, Connection] = {}
        self._frontends: dict[tuple[str, int], FrontendProcess] = {}
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._stopping = False
        self._closed = False  # to new connections
        self._thread = 0  # of `run`
        self._running: tuple[int, int] | None = None  # the request the model works on
        self._unwanted = False  # that it has been cancelled
        self.executed = 0

    def stop(self) -> None:
        """Finish what was accepted, then return from `run`. Safe from any thread or signal."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"w")
        except BlockingIOError:
            pass

    @property
    def queued(self) -> int:
        return len(self._queue)

    def run(self) -> None:
        """Serve until stopped and everything accepted is answered."""
        self._thread = threading.get_ident()
        trim_at = time.monotonic() + WAKE_S
        while True:
            events = self._epoll.poll(0 if self._queue or self._stopping else WAKE_S)
            for fd, _ in events:
                self._ready(fd)
            if self._stopping and not self._closed:
                self._take_the_last()
            if self._queue:
                self._next()
            elif self._stopping and not events:
                return
            now = time.monotonic()
            if now >= trim_at:
                self._memory.trim(self._idle_s)
                self._statistics.measure(self._memory)
                trim_at = now + WAKE_S

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

    def _busy(self) -> set[int]:
        """Channels with a request that has been taken and not answered."""
        return {fd for fd, _ in self._queue}

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
            cancelled = self._queue.cancel((connection.fd, message.request))
            if cancelled is not None:
                answer = Answer(message.request, error_code="CANCELLED", error="cancelled")
                self._send(connection, answer, [])
            else:
                self._cancel(connection, message.request)
        elif isinstance(message, Credit):
            connection.frontend.release(self._memory, message.slots)
            self._credit(connection, message)
        return False

    def _cancel(self, connection: Connection, request: int) -> None:
        """A request that is not queued (any more) is not wanted."""
        if (connection.fd, request) == self._running:
            self._unwanted = True

    def _credit(self, connection: Connection, message: Credit) -> None:
        """Only streams have use for it."""

    def _tell_freed(self, connection: Connection, frontend: FrontendProcess) -> None:
        """A frontend that sends releases by themselves has no answer that could tell it."""
        if frontend.freed:
            self._send(connection, Answer(0), [])

    def _cancelled(self) -> bool:
        """Whether the request that runs has been cancelled: the model asks, so look what came.

        Nothing is run meanwhile. From a thread of the model's own: what is known already.
        """
        if not self._unwanted and threading.get_ident() == self._thread:
            for fd, _ in self._epoll.poll(0):
                self._ready(fd)
        return self._unwanted

    def _take_request(
        self, connection: Connection, frontend: FrontendProcess, message: Execute, fds: list[int]
    ) -> None:
        if message.offers or fds:
            frontend.segments.accept(message.offers, fds)
        if message.dropped:
            frontend.segments.drop(message.dropped)
        if message.release:
            frontend.release(self._memory, message.release)
        key = (connection.fd, message.request)
        self._queue.push(key, (connection, message), message.deadline_ns)
        self._status.set_depth(len(self._queue))

    def _welcome(self, connection: Connection, hello: FrontendHello) -> None:
        if hello.version != messages.VERSION or connection.frontend is not None:
            raise ProtocolViolation(f"hello of version {hello.version}")
        key = (hello.process, connection.channel.peer_pid)
        frontend = self._frontends.setdefault(
            key, FrontendProcess(hello.process, self._devices.mappings)
        )
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
        if self._running is not None and self._running[0] == connection.fd:
            self._unwanted = True
        self._connections.pop(connection.fd, None)
        if not connection.refusing:
            self._epoll.unregister(connection.fd)
        connection.channel.close()
        self._queue.drop_where(lambda key: key[0] == connection.fd)
        frontend = connection.frontend
        if frontend is not None:
            frontend.connections -= 1
            if not frontend.connections:
                frontend.close(self._memory)
                self._frontends.pop((frontend.name, connection.channel.peer_pid), None)

    # ------------------------------------------------------------------- run

    def _next(self) -> None:
        now = time.monotonic_ns()
        popped = self._queue.pop(now)
        if popped is None:
            return
        (connection, message), in_time = popped
        frontend = connection.frontend
        assert frontend is not None
        self._status.set_depth(len(self._queue) + 1)
        if in_time:
            self._status.set_busy(now)
            self._running, self._unwanted = (connection.fd, message.request), False
            try:
                answer, segments = self._runner.run(frontend, message, now)
            except ProtocolViolation as ex:
                log.warning("closing a channel of pid %d: %s", connection.channel.peer_pid, ex)
                self._close(connection)
                return
            finally:
                self._running = None
                self._status.set_busy(0)
                self._status.set_depth(len(self._queue))
            self.executed += 1
            if not answer.error_code:  # before it is sent: whoever has it finds it counted
                self._statistics.ran(message, answer.timing)
        else:
            answer, segments = late(message.request), []
        self._send(connection, answer, segments)
        self._end_if_lost()

    def _following(self) -> tuple[FrontendProcess, Execute] | None:
        """The request that comes next, if it is here already."""
        found = self._queue.peek()
        if found is None or found[0].frontend is None:
            return None
        return found[0].frontend, found[1]

    def _end_if_lost(self) -> None:
        """Without its device the process is of no use: what waits gets EOF, so that it runs
        elsewhere or is told at once, and the supervisor starts another."""
        if self._devices.lost:
            log.critical("ending, the device is lost: %s", self._devices.lost)
            os.kill(os.getpid(), signal.SIGKILL)

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
