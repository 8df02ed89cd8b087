"""The loop of a model with `dynamic_batching`: take requests in, run them in batches, answer.

One thread does everything, as in the ordinary loop. Where requests may be refused while they
wait, a second one looks after the channels while the model runs, so that they are told at once;
never do both work on them at a time.
"""

from __future__ import annotations

import threading
import time

from msgspec import UNSET
from msgspec.structs import replace

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.core.scheduling.batch_queue import BatchQueue, BatchSource, Waiting
from shmserve.errors import Code
from shmserve.executor.backend import Backend, BatchForm
from shmserve.executor.batch_runner import BatchMember, BatchRunner
from shmserve.executor.lanes.lane import Event
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.loop.serving_loop import REST_S, WAKE_S, Key, Requested, ServingLoop
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.runner import cancelled, late
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, Execute
from shmserve.shm.status_page import BUSY_SINCE, DEPTH, RUNNING


class BatchLoop(ServingLoop):
    """Runs requests in batches."""

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        policy: BatchPolicy,
        resources: SharedResources | None = None,
    ) -> None:
        """`policy`: of the model's configuration."""
        super().__init__(backend, workspace, channels, segment_idle_s, resources)
        self._runner = BatchRunner(backend, workspace, self._is_cancelled)
        self._takes_batches = backend.batching is not BatchForm.ALONE and policy.max_size > 1
        if not self._takes_batches:  # then there is nothing to wait for
            policy = replace(policy, max_delay_ns=0)
        self._ragged = {e.name for e in workspace.spec.config.input if e.allow_ragged_batch}
        if backend.batching is BatchForm.STACKED:
            self._ragged = set()
        self._batches: BatchQueue[Key, Requested] = BatchQueue(policy)
        self._queue: BatchSource[Key, Requested] = self._batches
        batching = workspace.spec.config.dynamic_batching
        self._takes_turns = batching is UNSET or not batching.preserve_ordering
        self._running: dict[Key, bool] = {}  # by request: whether it is still wanted
        self._running_since = 0
        self._thread = 0  # of `run`
        self._watches = policy.is_bounded
        self._channels_lock = threading.Lock()
        self._model_runs = threading.Event()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def run(self) -> None:
        """Serve until stopped and everything accepted is answered."""
        self._thread = threading.get_ident()
        if self._watches:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        with self._channels_lock:
            self._serve_all()
            self._watches = False
        self._model_runs.set()

    def _serve_all(self) -> None:
        wait_s, resources = WAKE_S, self._resources
        while True:
            self._take_in(wait_s)
            if self._stopping and not self._channels.closed:
                self._channels.refuse(self._busy)
                self._take_in(0)
            turn = self._queue.next(time.monotonic_ns(), self._channels.closed, self._may_run)
            self._tell(turn.late, turn.rejected)
            if turn.late or turn.rejected:
                self._publish()
            wait_s = WAKE_S if turn.wait_ns is None else min(WAKE_S, turn.wait_ns / 1e9)
            if turn.batch:
                self._serve([waiting.item for waiting in turn.batch])
                wait_s = 0.0 if len(self._queue) or self._stopping or resources else WAKE_S
                if resources is not None:
                    resources.spent()
            elif self._is_over:
                if resources is not None:
                    resources.may_run(False)  # the model may take its time to finalize
                return
            elif resources is not None:
                resources.may_run(turn.is_due and self._has_room)
            self._workspace.settle()
            if time.monotonic() >= self._tick_at and self._tick() and turn.wait_ns is None:
                wait_s = wait_s and REST_S

    @property
    def _has_room(self) -> bool:
        """Whether a batch could run now, if it were due and the resources there."""
        return True

    @property
    def _may_run(self) -> bool:
        return self._resources is None or self._resources.held

    @property
    def _is_over(self) -> bool:
        """Nothing is left to do, and nothing comes."""
        return self._channels.closed and self._channels.settled and not len(self._queue)

    @property
    def _busy(self) -> set[FrontendConnection]:
        """Those with a request that has been taken and not answered."""
        return {connection for connection, _ in self._queue}

    # ------------------------------------------------------------------ intake

    def _take_in(self, wait_s: float) -> None:
        """Queue what comes within a time, and take out what is not wanted any more."""
        if 0 < wait_s < WAKE_S:  # a batch is due then: not a millisecond later
            self._channels.wait(wait_s)
            wait_s = 0
        for connection, message in self._receive(wait_s):
            if isinstance(message, Execute):
                self._push(connection, message)
            elif isinstance(message, Cancel):
                self._cancel((connection, message.request))
            elif message is None:
                self._forget(connection)
            else:
                self._credit(connection, message)

    def _receive(self, wait_s: float) -> list[Event]:
        """What has come; waits for it at most so long."""
        return self._channels.receive(wait_s)

    def _credit(self, connection: FrontendConnection, message: Credit) -> None:
        """Of a stream, where there are any."""

    def _push(self, connection: FrontendConnection, message: Execute) -> None:
        key = (connection, message.request)
        asked, timeout = message.parameters.get("priority"), message.parameters.get("timeout")
        rows = max(1, self._statistics.elements(message))
        kind = self._kind(message) if self._takes_batches else None
        waiting = Waiting(
            key,
            (connection, message),
            rows,
            key if kind is None else kind,
            min(message.sent_ns, time.monotonic_ns()),
            message.deadline_ns,
            caller=message.caller_number if self._takes_turns else 0,
        )
        timeout_ns = timeout * 1000 if isinstance(timeout, int) else 0  # microseconds
        if not self._batches.push(waiting, asked, timeout_ns):
            self._refuse((connection, message), "Exceeds maximum queue size")

    def _kind(self, message: Execute) -> frozenset[object] | None:
        """What requests must have in common to meet in a batch; None: it meets none."""
        if not message.inputs:
            return None
        shapes: set[object] = {
            (tensor.name, None if tensor.name in self._ragged else tensor.shape[1:])
            for tensor in message.inputs
        }
        return frozenset(shapes.union(message.outputs or self._workspace.outputs))

    def _cancel(self, key: Key) -> None:
        if key in self._running:
            self._running[key] = False
        elif self._queue.cancel(key) is not None:
            self._send_unrun(key[0], cancelled(key[1]))
            self._publish()

    def _forget(self, connection: FrontendConnection) -> None:
        for key in self._running:
            if key[0] is connection:
                self._running[key] = False
        for key in self._queue:
            if key[0] is connection:
                self._runner.let_go(*key)
        self._queue.drop_where(lambda key: key[0] is connection)
        self._publish()

    def _tell(self, overdue: list[Requested], rejected: list[Requested]) -> None:
        """Answer requests that will never run."""
        for connection, message in overdue:
            self._send_unrun(connection, late(message.request))
        for requested in rejected:  # that and no more: clients compare all of it
            self._send_refusal(requested, "Request timeout expired")

    def _send_unrun(self, connection: FrontendConnection, answer: Answer) -> None:
        """The answer to a request that waits no longer, and has run if it has been rescheduled."""
        retained = self._runner.let_go(connection, answer.request)
        self._channels.send(connection, replace(answer, retained=retained), [])

    def _has_run(self, members: list[BatchMember]) -> None:
        """The model has worked on these, whose answers go next: for loops with books of them."""

    def _refuse(self, requested: Requested, why: str) -> None:
        _, message = requested
        self._send_refusal(requested, f"[request id: {message.id or '<id_unknown>'}] {why}")

    def _send_refusal(self, requested: Requested, text: str) -> None:
        connection, message = requested
        answer = Answer(message.request, error_code=Code.UNAVAILABLE, error=text, refused=True)
        self._channels.send(connection, answer, [])

    def _publish(self) -> None:
        self._status.words[RUNNING] = running = len(self._running)
        self._status.words[DEPTH] = len(self._queue) + running
        self._status.words[BUSY_SINCE] = self._running_since

    def _is_cancelled(self, connection: FrontendConnection, request: int) -> bool:
        """Whether a request that runs has been cancelled: the model asks, so look what came.
        From a thread of the model's own, or where another looks after it: what is known."""
        wanted = self._running.get((connection, request), False)
        if wanted and not self._watches and threading.get_ident() == self._thread:
            self._take_in(0)
            self._publish()
            wanted = self._running.get((connection, request), False)
        return not wanted

    # --------------------------------------------------------------------- runs

    def _serve(self, batch: list[Requested]) -> None:
        """Have the model work on a batch, and answer."""
        now = self._running_since = time.monotonic_ns()
        self._running = {(connection, m.request): True for connection, m in batch}
        self._publish()
        self._let_watch(True)
        try:
            members = self._runner.run(batch, now)
        finally:
            self._let_watch(False)
        self._has_run(members)
        self._running, self._running_since = {}, 0
        self._publish()
        over = [member for member in members if not member.rescheduled]
        self.executed += len(over)
        self._count(members)  # before they are sent: whoever has one finds it counted
        for member in over:
            member.connection.frontend.hold(member.leases)
            if member.violation:
                self._channels.expel(member.connection, member.violation)
            else:
                self._channels.send(member.connection, member.answer, member.segments)

    def _count(self, members: list[BatchMember]) -> None:
        answered = [(m.message, m.answer.timing) for m in members if not m.has_failed]
        if answered:
            self._statistics.ran_batch(answered)

    def _let_watch(self, watch: bool) -> None:
        """Hand the channels to the other thread, or take them back."""
        if not self._watches:
            return
        if watch:
            self._channels_lock.release()
            self._model_runs.set()
        else:
            self._model_runs.clear()
            self._channels.wake()
            self._channels_lock.acquire()

    def _watch(self) -> None:
        """While the model runs: take in what comes, and tell what will not run."""
        while True:
            self._model_runs.wait()
            with self._channels_lock:
                if not self._watches:
                    return
                if not self._model_runs.is_set():
                    continue
                end_ns = self._queue.next_end_ns
                self._take_in(min(WAKE_S, max(0.0, (end_ns - time.monotonic_ns()) / 1e9)))
                self._tell(*self._queue.expire(time.monotonic_ns()))
                self._publish()
