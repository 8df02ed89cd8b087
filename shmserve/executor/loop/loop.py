"""Executor loop: takes requests in, has the model run them, and sends the answers.

The loop is the same for all models, and its parts differ. `loop_assembly` puts the parts together:

    intake      turns a message into a waiting request, or refuses it; owns the scheduler
    scheduler   core/scheduling: decides which requests run next, alone or as a batch
    runner      has the model run these requests
    streams     open streams of a decoupled model, and answers on their way from the model's
                threads; other models have no streams: the run returns the answer

States of a request: waiting (in the scheduler), running (`_running`), answered. A request of an
iterative sequence that the model has rescheduled waits again. A stream is open from its first run
until its final answer is sent, whether or not `execute` has returned by then.

Threads: the main thread, which has loaded the model, runs `run` and all requests. With a model
that refuses waiting requests in time, publishes sequences, or streams, a second thread looks after
the channels while the model runs (`channel_watch`). Other models need one thread and no lock: the
executor reads new messages when the model asks whether its request is cancelled. The thread that
has the channels calls `_attend`. Only the main thread asks the scheduler which requests run next.

    main thread      _attend -> scheduler.next -> _serve -> runner.run -> answers -> _attend ...
    second thread    _attend_meanwhile, while runner.run is inside of the model
    model's threads  StreamBook.post, is_cancelled
    link's thread    stop, wake, queued, executed
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from msgspec import Struct

from shmserve.executor.loop.channel_watch import ChannelWatch
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import IsCancelled, Key, Requested, Runner, cancelled, late
from shmserve.executor.loop.scheduler_intake import SchedulerIntake
from shmserve.executor.loop.stream_book import StreamBook
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Cancel, Execute
from shmserve.shm.status_page import BUSY_SINCE, DEPTH, RUNNING

WAKE_S = 1.0  # between two checks of idle memory and gauges
REST_S = 3600.0  # wait while such checks would change nothing

ModelRuns = AbstractContextManager[None]  # surrounds each call of the model
MakeRunner = Callable[[IsCancelled, ModelRuns], Runner]


class LoopParts(Struct, frozen=True):
    """Parts that the loop, the intake and the runner of one model share. `segment_idle_s`: time, in
    seconds, until unused memory is given back."""

    channels: Channels
    workspace: Workspace
    statistics: RunStatistics
    streams: StreamBook
    segment_idle_s: float


class Loop:
    """Serves one loaded backend on the channels of one listener until `stop` is called.

    Args:
        parts: parts shared with intake and runner.
        intake: intake with the scheduler.
        make_runner: makes the runner from `is_cancelled` and the context manager that surrounds
            each call of the model.
        resources: resources that the instance must hold for each execution; None without rate
            limit.
    """

    def __init__(
        self,
        parts: LoopParts,
        intake: SchedulerIntake,
        make_runner: MakeRunner,
        resources: SharedResources | None = None,
    ) -> None:
        self._answered = 0
        self._channels = channels = parts.channels
        self._workspace = workspace = parts.workspace
        self._queue = intake.queue
        self._push = intake.push
        self._rejection = intake.rejection
        self._receive = channels.receive_in_order if intake.in_order else channels.receive
        self._streams = parts.streams
        self._statistics = parts.statistics
        self._idle_s = parts.segment_idle_s
        self._resources = resources
        self._words = channels.status.words
        self._decoupled = workspace.spec.decoupled
        self._running: dict[Key, bool] = {}  # False: the answer is unwanted
        self._busy_since = 0
        self._stopping = False
        self._thread = 0  # ident of the thread in `run`
        self._tick_ns = time.monotonic_ns() + int(WAKE_S * 1e9)
        self._watch: ChannelWatch | None = None
        if intake.is_watched:
            attend = self._attend_meanwhile
            self._watch = ChannelWatch(attend, channels.wake, channels.disconnect)
        self._runner = make_runner(self.is_cancelled, self._watch or nullcontext())

    def run(self) -> None:
        """Serve until `stop` was called and all accepted requests are answered."""
        self._thread = threading.get_ident()
        if self._watch is None:
            self._serve_all()
        else:
            self._watch.serve(self._serve_all)

    def stop(self) -> None:
        """Let `run` return once all accepted requests are answered. Safe from any thread or
        signal."""
        self._stopping = True
        self._channels.wake()

    def wake(self) -> None:
        """Have the loop check idle memory and gauges, which have changed. Safe from any thread."""
        self._channels.wake()

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue.waiting)

    @property
    def executed(self) -> int:
        """Number of requests and streams that the model has finished."""
        return self._answered + self._streams.ended

    def _serve_all(self) -> None:
        wait_s, resources, streams = WAKE_S, self._resources, self._streams
        while True:
            self._attend(wait_s, not streams.streams)
            may_run = resources is None or resources.held
            if streams.streams and may_run:
                may_run = streams.has_room
            now_ns = time.monotonic_ns()
            turn = self._queue.next(now_ns, self._channels.closed, may_run)
            if turn.late or turn.rejected:
                self._refuse(turn.late, turn.rejected)
            wait_s = WAKE_S if turn.wait_ns is None else min(WAKE_S, turn.wait_ns / 1e9)
            if turn.batch:
                self._serve(turn.batch, now_ns)
                wait_s = 0.0 if self._queue.waiting or self._stopping or resources else WAKE_S
                if resources is not None:
                    resources.spent()
            else:
                if not turn.is_due:
                    self._runner.rest()
                self._publish()
                is_over = self._is_over()
                if resources is not None:  # give resources back before a long finalize
                    resources.may_run(turn.is_due and not is_over and streams.has_room)
                if is_over:
                    return
            self._workspace.settle()
            if time.monotonic_ns() >= self._tick_ns and self._tick() and turn.wait_ns is None:
                wait_s = wait_s and REST_S

    def _is_over(self) -> bool:
        """Return True if no work is left and no more can come."""
        waits = self._queue.waiting or self._streams.streams or self._streams.outbox
        return self._channels.closed and self._channels.settled and not waits

    # ------------------------------------------------- the thread that has the channels

    def _attend(self, wait_s: float, looks: bool = False) -> None:
        """Take in messages for at most `wait_s` seconds, and send the answers of streams. `looks`:
        no other thread runs the model, so the wait may begin with a look."""
        if self._stopping and not self._channels.closed:
            self._channels.refuse(self._busy())
            wait_s = 0
        if self._streams.outbox:
            wait_s = 0
        if 0 < wait_s < WAKE_S:  # a batch is due: `receive` rounds up to milliseconds
            self._channels.wait(wait_s)
            wait_s = 0
        for connection, message in self._receive(wait_s, looks):
            if type(message) is Execute:
                key, requested = (connection, message.request), (connection, message)
                self._push(key, requested, message.deadline_ns, message.caller_number)
            elif isinstance(message, Cancel):
                self._cancel((connection, message.request))
            elif message is None:
                self._forget(connection)
            else:
                self._streams.grant((connection, message.request), message.answers)
        if self._streams.outbox:
            self._streams.deliver()

    def _attend_meanwhile(self) -> None:
        """Look after the channels once while the model runs, in the second thread."""
        left_ns = self._queue.next_end_ns - time.monotonic_ns()
        self._attend(min(WAKE_S, max(0.0, left_ns / 1e9)))
        now_ns = time.monotonic_ns()
        if now_ns >= self._queue.next_end_ns:
            self._refuse(*self._queue.expire(now_ns))
        self._publish()
        self._workspace.settle()
        if now_ns >= self._tick_ns:
            self._tick()

    def _busy(self) -> set[FrontendConnection]:
        """Return the connections that have a request which is accepted and not answered."""
        keys: Iterable[Key] = (*self._queue.waiting, *self._running, *self._streams.streams)
        return {connection for connection, _ in keys}

    def _cancel(self, key: Key) -> None:
        if key in self._running:
            self._running[key] = False
        elif self._queue.cancel(key) is not None:
            self._withdraw(key[0], cancelled(key[1]))
        self._streams.mute(key)

    def _forget(self, connection: FrontendConnection) -> None:
        """Drop the requests of a connection that has closed."""
        for key in self._running:
            if key[0] is connection:
                self._running[key] = False
        self._streams.mute_all(connection)
        for key in [key for key in self._queue.waiting if key[0] is connection]:
            self._queue.cancel(key)
            self._runner.withdraw(connection, cancelled(key[1]))

    def _refuse(self, overdue: Sequence[Requested], rejected: Sequence[Requested]) -> None:
        """Answer waiting requests that will never run."""
        for connection, message in overdue:
            self._withdraw(connection, late(message.request))
        for connection, message in rejected:
            self._channels.send(connection, self._rejection(message), [])

    def _withdraw(self, connection: FrontendConnection, answer: Answer) -> None:
        complete = self._runner.withdraw(connection, answer)
        if complete is not None:
            self._channels.send(connection, complete, [])

    def _publish(self) -> None:
        """Publish on the status page how busy the executor is.

        Requests count as busy from the start of their run. Open streams count as busy since the
        last progress of the stream that has been still for longest, as seen by the last `_tick`.
        So after progress this time is up to `WAKE_S` too old.
        """
        words, running = self._words, len(self._running)
        if self._streams.streams:
            running = self._streams.count_with(self._running)
        words[RUNNING] = running
        words[DEPTH] = len(self._queue.waiting) + running
        words[BUSY_SINCE] = self._busy_since if running else 0

    def _tick(self) -> bool:
        """Check idle memory and gauges. Return True if the loop may rest until a message comes,
        False if the loop must check again."""
        self._tick_ns = time.monotonic_ns() + int(WAKE_S * 1e9)
        self._workspace.trim(self._idle_s)
        is_held = self._statistics.measure(self._workspace.memory)
        if self._decoupled:
            self._channels.end_late_streams()
            self._busy_since = self._streams.quiet_since()
            self._publish()
        if is_held or self._resources is not None or self._workspace.devices.ordinal is not None:
            return False
        is_idle = not (self._running or self._streams.streams)
        return is_idle and self._channels.quiet and self._channels.settled

    # ------------------------------------------------------------------------ runs

    def _serve(self, batch: Sequence[Requested], now_ns: int) -> None:
        """Have the model run a batch, and send the answers."""
        self._running = {(connection, message.request): True for connection, message in batch}
        if not (self._decoupled and self._streams.count_with(())):
            self._busy_since = now_ns
        self._publish()
        outcomes = self._runner.run(batch, now_ns)
        self._running = {}
        if self._decoupled:
            self._publish()
        else:
            self._words[DEPTH] = len(self._queue.waiting)
            self._words[RUNNING] = self._words[BUSY_SINCE] = 0
        for outcome in outcomes:
            connection, answer = outcome.connection, outcome.answer
            if outcome.violation:
                self._channels.expel(connection, outcome.violation)
            elif answer is not None and not outcome.rescheduled:
                self._answered += 1
                if outcome.leases:
                    connection.frontend.hold(outcome.leases)
                self._channels.send(connection, answer, outcome.segments)
                if outcome.uncounted:
                    self._statistics.ran_late(outcome.message, answer.timing)

    def is_cancelled(self, connection: FrontendConnection, number: int) -> bool:
        """Return True if the answer to a request is no longer wanted. With one thread, new
        messages are read first. Threads of the model get the state as of the messages read so
        far."""
        key = connection, number
        is_wanted = self._running.get(key, False)
        if is_wanted and self._watch is None and threading.get_ident() == self._thread:
            self._attend(0)
            self._publish()
            is_wanted = self._running.get(key, False)
        return not is_wanted
