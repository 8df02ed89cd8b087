"""The executor's loop: take requests in, run them one after the other, answer.

One thread does everything a request needs: epoll, receive, run, send. (Decoupled models are
served by `stream_loop`.)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time

from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.errors import ProtocolViolation
from shmserve.executor.backend import Backend
from shmserve.executor.channel_loop import ChannelLoop
from shmserve.executor.loop.connections import Connection, FrontendProcess
from shmserve.executor.run_statistics import Statistics
from shmserve.executor.runner import Runner, late
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.protocol.control.data_messages import Answer, Credit, Execute
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.status_page import StatusPage
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)

WAKE_S = 1.0  # idle work: trimming segments, noticing a stop


class Loop(ChannelLoop):
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
        super().__init__(
            process=process, instance=instance, listener=listener, memory=memory,
            status=status, mappings=regions.devices.mappings,
        )  # fmt: skip
        self._idle_s = segment_idle_s
        self._statistics = Statistics(status.counters, spec)
        self._regions = regions
        self._devices = regions.devices
        self._runner = Runner(backend, spec, memory, regions, self._cancelled, self._following)
        self._queue: RequestQueue[tuple[int, int], tuple[Connection, Execute]] = RequestQueue()
        self._stopping = False
        self._thread = 0  # of `run`
        self._running: tuple[int, int] | None = None  # the request the model works on
        self._unwanted = False  # that it has been cancelled
        self.executed = 0

    def stop(self) -> None:
        """Finish what was accepted, then return from `run`. Safe from any thread or signal."""
        self._stopping = True
        self._wake()

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
            else:
                self._runner.let_go()
                self._regions.tell_closed()
                self._end_if_lost()  # as the link's thread may have found
            now = time.monotonic()
            if now >= trim_at:
                self._memory.trim(self._idle_s)
                self._devices.trim(self._idle_s)
                self._statistics.measure(self._memory)
                trim_at = now + WAKE_S

    # ------------------------------------------------------------- the channels' side

    def _requested(self, connection: Connection, message: Execute) -> None:
        key = (connection.fd, message.request)
        self._queue.push(key, (connection, message), message.deadline_ns)
        self._status.set_depth(len(self._queue))

    def _cancel(self, connection: Connection, request: int) -> None:
        key = (connection.fd, request)
        if self._queue.cancel(key) is not None:
            self._send(connection, Answer(request, error_code="CANCELLED", error="cancelled"), [])
        else:
            self._cancel_started(connection, request)

    def _cancel_started(self, connection: Connection, request: int) -> None:
        """A request that is not queued (any more) is not wanted."""
        if (connection.fd, request) == self._running:
            self._unwanted = True

    def _credit(self, connection: Connection, message: Credit) -> None:
        """Only streams have use for it."""

    def _gone(self, connection: Connection) -> None:
        if self._running is not None and self._running[0] == connection.fd:
            self._unwanted = True
        self._queue.drop_where(lambda key: key[0] == connection.fd)

    def _busy(self) -> set[int]:
        return {fd for fd, _ in self._queue}

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
        self._regions.tell_closed()
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

    def _cancelled(self) -> bool:
        """Whether the request that runs has been cancelled: the model asks, so look what came.

        Nothing is run meanwhile. From a thread of the model's own: what is known already.
        """
        if not self._unwanted and threading.get_ident() == self._thread:
            for fd, _ in self._epoll.poll(0):
                self._ready(fd)
        return self._unwanted
