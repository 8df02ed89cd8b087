"""The executor's loop for decoupled models: any number of answers, at any time.

The model keeps the main thread, where it was loaded, and has as many threads of its own as
it likes; a second thread does all that `RequestLoop` does but run the model. They meet in an
outbox (from the model) and a work queue of one request (to it). A model takes its next
request as soon as `execute` has returned, up to `max_streams` open ones.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from msgspec import Struct

from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.errors import ProtocolViolation, ShmserveError
from shmserve.executor.backend import Backend
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.loop.serving_loop import REST_S, WAKE_S, Key, Requested, ServingLoop
from shmserve.executor.loop.stream import Posted, Stream, StreamAbandoned
from shmserve.executor.loop.stream_book import StreamBook
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.runner import cancelled, late, what_failed
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Credit, Execute
from shmserve.shm.status_page import BUSY_SINCE, DEPTH, RUNNING

log = logging.getLogger(__name__)


class _Returned(Struct, frozen=True):
    """From the model's thread: `execute` is over; `violation` is the frontend's, if any."""

    stream: Stream
    violation: str = ""


class StreamLoop(ServingLoop):
    """Runs requests of a decoupled model, whose answers are streams."""

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        max_streams: int,
        resources: SharedResources | None = None,
    ) -> None:
        super().__init__(backend, workspace, channels, segment_idle_s, resources)
        self._max_streams = max_streams
        self._queue: RequestQueue[Key, Requested] = RequestQueue()
        self._book: StreamBook[_Returned] = StreamBook(channels, workspace)
        self._streams = self._book.streams
        self._executing: Stream | None = None
        self._work: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._outbox = self._book.outbox
        self._busy_since = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

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
        self._book.post(_Returned(stream, violation))

    # ---------------------------------------------------- the loop's thread

    def _talk(self) -> None:
        try:
            self._serve()
        except BaseException:  # frontends see EOF at once, and the process ends
            log.critical("the executor's loop is broken", exc_info=True)
            raise
        finally:
            self._channels.disconnect()
            self._work.put(None)

    def _serve(self) -> None:
        wait_s = WAKE_S
        while True:
            busy = self._queue or self._streams or self._executing or self._outbox
            if self._channels.closed and self._channels.settled and not busy:
                return
            self._take_in(0 if self._outbox else wait_s)
            if self._stopping and not self._channels.closed:
                self._channels.refuse(
                    {connection for connection, _ in (*self._queue, *self._streams)}
                )
            while self._outbox:
                self._handle(self._outbox.popleft())
            self._workspace.settle()
            self._start_next()
            wait_s = WAKE_S
            if time.monotonic() >= self._tick_at and self._tick():
                wait_s = REST_S

    def _tick(self) -> bool:
        may_rest = super()._tick()
        self._channels.end_late_streams()
        executing = () if self._executing is None else (self._executing,)
        self._busy_since = self._book.quiet_since(executing)
        self._publish()
        return may_rest and not (self._streams or self._executing or self._queue)

    def _publish(self) -> None:
        self._status.words[RUNNING] = running = len(self._streams)
        self._status.words[DEPTH] = len(self._queue) + running
        self._status.words[BUSY_SINCE] = self._busy_since

    def _start_next(self) -> None:
        while popped := self._next():
            (connection, message), in_time = popped
            if connection.closed:
                continue
            if in_time:
                self._start(connection, message)
            else:
                self._channels.send(connection, late(message.request), [])
        self._publish()

    def _next(self) -> tuple[Requested, bool] | None:
        """What is to be started or told that it is late now, if anything is."""
        if self._executing is not None:
            return None
        may_run = bool(self._queue) and len(self._streams) < self._max_streams
        if self._resources is not None:
            is_due, may_run = may_run, self._resources.may_run(may_run)
            if is_due and not may_run:
                return self._queue.pop_late(time.monotonic_ns())
        return self._queue.pop(time.monotonic_ns()) if may_run else None

    def _start(self, connection: FrontendConnection, message: Execute) -> None:
        stream = self._book.open(connection, message)
        if stream is not None:
            self._executing = stream
            self._work.put(stream)

    # ------------------------------------------------------------- from the model

    def _handle(self, event: Posted | StreamAbandoned | _Returned) -> None:
        if isinstance(event, Posted):
            self._deliver(event)
        elif isinstance(event, StreamAbandoned):
            self._book.has_lost_sender(event)
        else:
            self._executing = None
            if self._resources is not None:
                self._resources.spent()
            if event.violation:
                self._channels.expel(event.stream.connection, event.violation)
                self._streams.pop((event.stream.connection, event.stream.number), None)

    def _deliver(self, posted: Posted) -> None:
        stream, answer = posted.stream, posted.answer
        self._statistics.answered(stream.spent, answer)
        if answer.final and (stream.connection, stream.number) in self._streams:
            self.executed += 1
            if not answer.error_code:
                self._statistics.streamed(stream.spent, stream.message)
        self._book.deliver(posted)

    # ------------------------------------------------------------- from frontends

    def _take_in(self, wait_s: float) -> None:
        for connection, message in self._channels.receive(wait_s):
            if message is None:
                self._forget(connection)
                continue
            key = (connection, message.request)
            stream = self._streams.get(key)
            if isinstance(message, Execute):
                item, caller = (connection, message), message.caller_number
                self._queue.push(key, item, message.deadline_ns, caller)
            elif isinstance(message, Credit):
                self._book.grant(key, message.answers)
            elif self._queue.cancel(key) is not None:
                self._channels.send(connection, cancelled(message.request), [])
            elif stream is not None:
                stream.mute()

    def _forget(self, connection: FrontendConnection) -> None:
        self._queue.drop_where(lambda key: key[0] is connection)
        self._book.mute(connection)
