"""The executor's loop: take requests in, run them one after the other, answer.

One thread does everything a request needs: epoll, receive, run, send. (Decoupled models are
served by `stream_loop`.)
"""

from __future__ import annotations

import threading
import time

from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.errors import ProtocolViolation
from shmserve.executor.backend import Backend
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection, FrontendProcess
from shmserve.executor.loop.serving_loop import REST_S, WAKE_S, Key, Requested, ServingLoop
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.runner import Runner, cancelled, late
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Cancel, Execute
from shmserve.shm.status_page import BUSY_SINCE, DEPTH, RUNNING


class RequestLoop(ServingLoop):
    """Runs requests one after the other."""

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        resources: SharedResources | None = None,
    ) -> None:
        super().__init__(backend, workspace, channels, segment_idle_s, resources)
        self._runner = Runner(backend, workspace, self._is_cancelled, self._following)
        self._queue: RequestQueue[Key, Requested] = RequestQueue()
        self._thread = 0  # of `run`
        self._running: Key | None = None  # what the model works on
        self._running_since = 0
        self._unwanted = False  # that it has been cancelled

    @property
    def queued(self) -> int:
        return len(self._queue)

    def run(self) -> None:
        """Serve until stopped and everything accepted is answered."""
        self._thread, resources = threading.get_ident(), self._resources
        wait_s = WAKE_S
        while True:
            self._take_in(wait_s)
            if self._stopping and not self._channels.closed:
                self._channels.refuse({connection for connection, _ in self._queue})
            may_run = resources is None or resources.may_run(bool(self._queue))
            pop = self._queue.pop if may_run else self._queue.pop_late
            popped = pop(time.monotonic_ns())
            if popped is not None:
                waiting = self._serve(*popped)
                wait_s = 0.0 if waiting or self._stopping or resources is not None else WAKE_S
                if resources is not None and may_run and popped[1]:  # not one that came too late
                    resources.spent()
            elif self._channels.closed and self._channels.settled and not self._queue:
                return
            else:
                wait_s = WAKE_S
                if self._runner.ahead is not None:
                    self._runner.let_go()
            self._workspace.settle()
            if time.monotonic() >= self._tick_at and self._tick() and wait_s:
                wait_s = REST_S

    def _take_in(self, wait_s: float) -> None:
        """Queue what comes within a time, and take out what is not wanted any more."""
        for connection, message in self._channels.receive(wait_s):
            if type(message) is Execute:
                key = (connection, message.request)
                item, caller = (connection, message), message.caller_number
                self._queue.push(key, item, message.deadline_ns, caller)
            elif isinstance(message, Cancel):
                self._cancel(connection, message.request)
            elif message is None:
                self._forget(connection)

    def _forget(self, connection: FrontendConnection) -> None:
        if self._running is not None and self._running[0] is connection:
            self._unwanted = True
        self._queue.drop_where(lambda key: key[0] is connection)
        self._publish()

    def _cancel(self, connection: FrontendConnection, request: int) -> None:
        if (connection, request) == self._running:
            self._unwanted = True
        elif self._queue.cancel((connection, request)) is not None:
            self._channels.send(connection, cancelled(request), [])
            self._publish()

    def _publish(self) -> int:
        """Tell frontends how busy the executor is; how many requests wait."""
        waiting = len(self._queue.waiting)
        words = self._status.words
        words[RUNNING] = running = self._running is not None
        words[DEPTH] = waiting + running
        words[BUSY_SINCE] = self._running_since
        return waiting

    def _serve(self, requested: Requested, in_time: bool) -> int:
        """Have the model work on a request, and answer; how many wait then."""
        connection, message = requested
        if not in_time:
            self._channels.send(connection, late(message.request), [])
            return self._publish()
        now = self._running_since = time.monotonic_ns()
        self._running, self._unwanted = (connection, message.request), False
        self._publish()
        answer: Answer | None = None
        segments: list[int] = []
        try:
            answer, segments = self._runner.run(connection.frontend, message, now)
        except ProtocolViolation as ex:
            self._channels.expel(connection, str(ex))
        self._running, self._running_since = None, 0
        waiting = self._publish()
        if answer is not None:
            self.executed += 1
            if not answer.error_code:  # before it is sent: whoever has it finds it counted
                statistics, timing = self._statistics, answer.timing
                statistics.counters.executed(
                    statistics.elements(message) if statistics.batching else 1,
                    time.time_ns() // 1_000_000,
                    timing.input,
                    timing.infer,
                    timing.output,
                    timing.queue,
                )
            self._channels.send(connection, answer, segments)
        return waiting

    def _following(self) -> tuple[FrontendProcess, Execute] | None:
        """The request that comes next, if it is here already."""
        first = self._queue.peek()
        return None if first is None else (first[0].frontend, first[1])

    def _is_cancelled(self) -> bool:
        """Whether the request that runs has been cancelled: the model asks, so look what came.

        Nothing is run meanwhile. From a thread of the model's own: what is known already.
        """
        if not self._unwanted and threading.get_ident() == self._thread:
            self._take_in(0)
            self._publish()
        return self._unwanted
