"""The executor's loop for decoupled models: any number of answers, at any time.

The model keeps the main thread, where it was loaded, and has as many threads of its own as
it likes; a second thread does all that `Loop` does but run the model. They meet in an
outbox (from the model) and a work queue of one request (to it). A model takes its next
request as soon as `execute` has returned, up to `max_streams` open ones.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from typing import Any

from msgspec import Struct

from shmserve.errors import Code, Internal, PeerDied, ProtocolViolation, ShmserveError
from shmserve.executor.holdings import Holdings
from shmserve.executor.inputs import InputReader
from shmserve.executor.loop.connections import Connection
from shmserve.executor.loop.request_loop import WAKE_S, Loop
from shmserve.executor.loop.stream import Abandoned, Parts, Posted, Stream
from shmserve.executor.runner import late, what_failed
from shmserve.protocol.control.data_messages import Answer, Credit, Execute
from shmserve.transport.channel import check_size

log = logging.getLogger(__name__)

_SILENT_NS = 5_000_000_000  # a stream that says nothing for so long may have lost its sender
_COLLECT_NS = 10_000_000_000


class _Returned(Struct, frozen=True):
    """From the model's thread: `execute` is over; `violation` is the frontend's, if any."""

    stream: Stream
    violation: str = ""


class StreamLoop(Loop):
    """Serves one loaded decoupled backend until `stop` is called."""

    def __init__(self, *, max_streams: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        spec, memory = arguments["spec"], arguments["memory"]
        reader = InputReader(spec.name, arguments["regions"])
        self._holdings = Holdings(memory)
        self._parts = Parts(spec, memory, arguments["regions"], reader, self._holdings, self._post)
        self._backend = arguments["backend"]
        self._max_streams = max_streams
        self._streams: dict[tuple[Connection, int], Stream] = {}  # the model owes their final flag
        self._executing: Stream | None = None
        self._work: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._outbox: deque[Posted | Abandoned | _Returned] = deque()  # bounded by credit
        self._collected_ns = 0

    def run(self) -> None:
        """Serve until stopped and everything accepted is answered. The model runs in here."""
        talking = threading.Thread(target=self._talk, name="loop", daemon=True)
        talking.start()
        while (stream := self._work.get()) is not None:
            self._execute(stream)
            del stream
        talking.join()

    def _execute(self, stream: Stream) -> None:
        violation = ""
        try:
            request = stream.begin()
        except ProtocolViolation as ex:
            violation = str(ex)
        except ShmserveError as ex:
            stream.fail(ex)
        else:
            try:
                self._backend.execute([request])
            except ShmserveError as ex:
                stream.fail(ex)
            except (Exception, SystemExit) as ex:
                stream.fail(what_failed(ex))
        self._post(_Returned(stream, violation))

    def _post(self, event: Posted | Abandoned | _Returned) -> None:
        """Hand something to the loop's thread; from any thread, also from a finalizer."""
        self._outbox.append(event)
        self._wake()

    # ---------------------------------------------------- the loop's thread

    def _talk(self) -> None:
        try:
            self._serve()
        except BaseException:  # frontends see EOF at once, and the process ends
            log.critical("the executor's loop is broken", exc_info=True)
            raise
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            self._work.put(None)

    def _serve(self) -> None:
        tick_at = time.monotonic() + WAKE_S
        while True:
            settled = not (self._queue or self._streams or self._executing or self._outbox)
            if self._stopping and settled and not self._has_backlog():
                return
            for fd, mask in self._epoll.poll(0 if self._outbox else WAKE_S):
                if mask & select.EPOLLOUT:
                    self._send_backlog(fd)
                if mask & ~select.EPOLLOUT:
                    self._ready(fd)
            if self._stopping and not self._closed:
                self._take_the_last()
            while self._outbox:
                self._handle(self._outbox.popleft())
            self._regions.tell_closed()
            self._end_if_lost()
            self._start_next()
            now = time.monotonic()
            if now >= tick_at:
                self._tick()
                tick_at = now + WAKE_S

    def _tick(self) -> None:
        now = time.monotonic_ns()
        self._holdings.settle()
        self._memory.trim(self._idle_s)
        self._devices.trim(self._idle_s)
        self._statistics.measure(self._memory)
        quiet = [s.progress_ns for s in self._streams.values() if not s.waiting]
        if self._executing is not None and not self._executing.waiting:
            quiet.append(self._executing.progress_ns)
        since = min(quiet, default=0)
        self._status.set_busy(since)
        if since and now - since > _SILENT_NS and now - self._collected_ns > _COLLECT_NS:
            self._collected_ns = now
            gc.collect()  # a sender in a reference cycle is not let go of by itself

    def _start_next(self) -> None:
        while self._queue and self._executing is None and len(self._streams) < self._max_streams:
            popped = self._queue.pop(time.monotonic_ns())
            assert popped is not None
            (connection, message), in_time = popped
            if in_time:
                self._start(connection, message)
            else:
                self._send(connection, late(message.request), [])
        self._status.set_depth(len(self._queue) + len(self._streams))

    def _start(self, connection: Connection, message: Execute) -> None:
        assert connection.frontend is not None
        try:
            if (connection, message.request) in self._streams:
                raise ProtocolViolation("a request number was used twice")
            if not message.credit:
                answer = Answer(
                    message.request,
                    error_code=Code.UNIMPLEMENTED,
                    error="a decoupled model needs a stream",
                )
                self._send(connection, answer, [])
                return
            stream = Stream(self._parts, connection, connection.frontend, message)
        except ProtocolViolation as ex:
            self._expel(connection, str(ex))
            return
        self._streams[connection, message.request] = self._executing = stream
        self._work.put(stream)

    def _expel(self, connection: Connection, why: str) -> None:
        log.warning("closing a channel of pid %d: %s", connection.channel.peer_pid, why)
        self._close(connection)

    # ------------------------------------------------------------- from the model

    def _handle(self, event: Posted | Abandoned | _Returned) -> None:
        if isinstance(event, Posted):
            self._deliver(event)
        elif isinstance(event, Abandoned):
            name = event.stream.frontend.name
            log.warning("request %d of %s has no final response", event.stream.number, name)
            event.stream.fail(
                Internal("the model let go of the request without sending its final response")
            )
        else:
            self._executing = None
            if event.violation:
                self._expel(event.stream.connection, event.violation)
                self._streams.pop((event.stream.connection, event.stream.number), None)

    def _deliver(self, posted: Posted) -> None:
        stream, answer = posted.stream, posted.answer
        key = (stream.connection, stream.number)
        wanted = self._streams.get(key) is stream and not stream.connection.closed
        self._statistics.answered(stream.spent, answer)
        if answer.final and self._streams.pop(key, None) is not None:
            self.executed += 1
            if not answer.error_code:
                self._statistics.streamed(stream.spent, stream.message)
        if not wanted:
            for lease in posted.leases:
                self._memory.release(*lease)
            return
        stream.frontend.held.update(posted.leases)
        self._send(stream.connection, answer, posted.segments)

    # ----------------------------------------------------- to and from frontends

    def _cancel_started(self, connection: Connection, request: int) -> None:
        stream = self._streams.get((connection, request))
        if stream is not None:
            stream.mute()

    def _credit(self, connection: Connection, message: Credit) -> None:
        stream = self._streams.get((connection, message.request))
        if stream is not None:
            stream.grant(message.answers)

    def _close(self, connection: Connection) -> None:
        super()._close(connection)
        for (other, _), stream in self._streams.items():
            if other is connection:
                stream.mute()
        while connection.backlog:
            _close_all(connection.backlog.popleft()[1])

    def _transmit(self, connection: Connection, data: bytes, fds: list[int]) -> None:
        """Never waits for a frontend: what it has no room for is kept until it has."""
        if connection.backlog:
            check_size(data)
        elif connection.channel.send_now(data, fds):
            return
        else:
            self._await_room(connection)
        connection.backlog.append((data, [os.dup(fd) for fd in fds]))

    def _await_room(self, connection: Connection) -> None:
        if connection.refusing:
            self._epoll.register(connection.fd, select.EPOLLOUT)
        else:
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _refuse(self, connection: Connection) -> None:
        already = connection.refusing
        super()._refuse(connection)
        if connection.backlog and not already and not connection.closed:
            self._await_room(connection)

    def _busy(self) -> set[int]:
        return super()._busy() | {connection.fd for connection, _ in self._streams}

    def _send_backlog(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        backlog = connection.backlog
        try:
            while backlog and connection.channel.send_now(*backlog[0]):
                _close_all(backlog.popleft()[1])
        except PeerDied:
            self._close(connection)
            return
        if not backlog and connection.refusing:
            self._epoll.unregister(fd)
        elif not backlog:
            self._epoll.modify(fd, select.EPOLLIN)

    def _has_backlog(self) -> bool:
        return any(connection.backlog for connection in self._connections.values())


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
