"""The loop of a decoupled model with `sequence_batching`: batches of streams.

The model runs in batches of requests of different sequences, as any model of sequences does, and
answers them as any decoupled one does: at any time, from any thread, as often as it likes.
A sequence goes on when `execute` has returned, whether or not the stream has ended by then.
"""

from __future__ import annotations

import time
from math import inf

from msgspec.structs import replace

from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import Step
from shmserve.errors import Cancelled, ProtocolViolation, ShmserveError
from shmserve.executor.lanes.lane import Event
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.loop.sequence_loop import SequenceLoop
from shmserve.executor.loop.serving_loop import Key, Requested
from shmserve.executor.loop.stream import Posted, Stream
from shmserve.executor.loop.stream_book import StreamBook
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.runner import what_failed
from shmserve.executor.sequences.sequence_backend import SequenceBackend, sequence_of
from shmserve.executor.tensors.request import ExecutorRequest
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Credit, Execute, Timing
from shmserve.shm.status_page import BUSY_SINCE, DEPTH, RUNNING

_MOST_TURNS = 256  # a new connection takes three, and they are let in one by one


class SequenceStreamLoop(SequenceLoop):
    """Serves one loaded backend as `SequenceLoop` does. So many streams that the model has
    released may be open as the policy says; others wait."""

    def __init__(
        self,
        backend: SequenceBackend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        policy: SequencePolicy,
        resources: SharedResources | None = None,
    ) -> None:
        super().__init__(backend, workspace, channels, segment_idle_s, policy, resources)
        self._max_streams = policy.max_streams
        self._book: StreamBook[Posted] = StreamBook(channels, workspace)
        self._paused: dict[Key, Stream] = {}  # they are to run again
        self._turn: dict[Key, Stream] = {}  # the model has them now
        self._counted = 0  # of these, if their run is counted already

    # ------------------------------------------------------------- what the base asks

    @property
    def _may_run(self) -> bool:
        return super()._may_run and self._has_room

    @property
    def _has_room(self) -> bool:
        return self._open_streams < self._max_streams

    @property
    def _open_streams(self) -> int:
        """Those that are not paused; of these a thread of the model may have ended some."""
        return sum(key not in self._paused for key in self._book.streams)

    @property
    def _is_over(self) -> bool:
        return super()._is_over and not (self._book.streams or self._book.outbox)

    @property
    def _busy(self) -> set[FrontendConnection]:
        return super()._busy | {connection for connection, _ in self._book.streams}

    def _tick(self) -> bool:
        may_rest = super()._tick()
        self._publish()  # time has passed for streams that the model has left alone
        return may_rest and not self._book.streams

    def _publish(self) -> None:
        streams, turn = self._book.streams, self._turn
        running = self._open_streams + sum(key not in streams for key in turn)
        self._status.words[RUNNING] = running
        self._status.words[DEPTH] = len(self._queue) + running
        # A stream that has ended counts for as long as the model has not returned from its run.
        self._status.words[BUSY_SINCE] = self._book.quiet_since(turn.values(), self._paused)

    # ------------------------------------------------------------- from frontends

    def _receive(self, wait_s: float) -> list[Event]:
        return receive_in_order(self._channels, wait_s)

    def _take_in(self, wait_s: float) -> None:
        super()._take_in(0 if self._book.outbox else wait_s)
        if not self._book.outbox:
            return
        while self._book.outbox:
            event = self._book.outbox.popleft()
            if isinstance(event, Posted):
                self._deliver(event)
            else:
                self._book.has_lost_sender(event)
        self._publish()

    def _credit(self, connection: FrontendConnection, message: Credit) -> None:
        self._book.grant((connection, message.request), message.answers)

    def _cancel(self, key: Key) -> None:
        super()._cancel(key)
        stream = self._book.streams.get(key)
        if stream is not None:
            stream.mute()

    def _forget(self, connection: FrontendConnection) -> None:
        self._book.mute(connection)
        for key in [key for key in self._paused if key[0] is connection]:
            self._paused.pop(key).fail(Cancelled("cancelled"))
        super()._forget(connection)

    def _send_unrun(self, connection: FrontendConnection, answer: Answer) -> None:
        stream = self._paused.pop((connection, answer.request), None)
        if stream is None:
            super()._send_unrun(connection, answer)
        else:
            stream.fail(Cancelled("cancelled"))

    # ------------------------------------------------------------------------ runs

    def _serve(self, batch: list[Requested]) -> None:
        self._forget_states(batch)
        opened = [self._open(*requested) for requested in batch]
        requests = [each for each in opened if each is not None]
        self._running = dict.fromkeys(self._turn, True)
        self._publish()
        started_ns = time.monotonic_ns()
        self._let_watch(True)
        try:
            error = self._execute(requests)
        finally:
            self._let_watch(False)
        if error is not None:
            for stream in self._turn.values():
                stream.fail(error)
        self._count_run(time.monotonic_ns() - started_ns)
        self._counted = 0
        again = self._settle(batch)
        self._turn, self._running = {}, {}
        self._sequences.done(time.monotonic_ns(), again)
        self._publish()

    def _count_run(self, infer_ns: int = 0) -> None:
        """Before the first answer of a run is sent, and again with its time when it is over."""
        runs = 0 if self._counted else 1
        self._counted = self._counted or sum(not each.has_failed for each in self._turn.values())
        if self._counted:
            self._statistics.iterated(self._counted, Timing(infer=infer_ns), runs)

    def _execute(self, requests: list[ExecutorRequest]) -> ShmserveError | None:
        try:
            if requests:
                self._backend.execute(requests)
        except ShmserveError as ex:
            return ex.with_traceback(None)  # that would keep views of inputs
        except (Exception, SystemExit) as ex:
            return what_failed(ex)
        return None

    def _open(self, connection: FrontendConnection, message: Execute) -> ExecutorRequest | None:
        """The request for its next run; None: there is nothing to run, and whoever is to know it
        is told."""
        key = (connection, message.request)
        stream = self._paused.pop(key, None)
        if stream is not None:
            if not stream.rescheduled:  # a thread of the model has ended it meanwhile
                return None
            self._turn[key] = stream
            return stream.resume(message)
        stream = self._book.open(connection, message)
        if stream is None:
            return None
        try:
            request = stream.begin()
        except ProtocolViolation as ex:
            self._book.streams.pop(key, None)
            self._channels.expel(connection, str(ex))
            return None
        except ShmserveError as ex:
            stream.fail(ex)
            return None
        self._turn[key] = stream
        return request

    def _settle(self, batch: list[Requested]) -> dict[Key, Step[Key, Requested]]:
        """Keep the states of what has run; what is to run again."""
        again: dict[Key, Step[Key, Requested]] = {}
        for connection, message in batch:
            key = (connection, message.request)
            stream = self._turn.get(key)
            has_run = stream is not None and not stream.has_failed
            self._sequence_backend.states.settle(sequence_of(message.parameters), has_run)
            if stream is None or not stream.rescheduled:
                continue
            if not self._running[key]:
                stream.fail(Cancelled("cancelled"))
                continue
            stream.pause()
            self._paused[key] = stream
            again[key] = self._again(connection, replace(message, deadline_ns=0))  # it has begun
        return again

    # ------------------------------------------------------------- from the model

    def _deliver(self, posted: Posted) -> None:
        stream, answer, spent = posted.stream, posted.answer, posted.stream.spent
        if not answer.error_code and (stream.connection, stream.number) in self._turn:
            self._count_run()
        self._statistics.answered(spent, answer)
        if answer.final and (stream.connection, stream.number) in self._book.streams:
            self.executed += 1
            if not answer.error_code:  # before it is sent: whoever has it finds it counted
                timing = Timing(spent.queue_ns, 0, spent.infer_ns, spent.output_ns)
                self._statistics.finished(timing)
        self._book.deliver(posted)


def receive_in_order(channels: Channels, wait_s: float) -> list[Event]:
    """What has come, requests in the order in which they were sent: those of one sequence, whose
    client does not wait for the answers, come on several connections, some of them new."""
    events = channels.receive(wait_s)
    if any(type(message) is Execute for _, message in events):
        for _ in range(_MOST_TURNS):  # what was sent before is there by now
            events += channels.receive(0)
            if channels.quiet:
                break
        channels.quiet = False
    events.sort(key=_sent_ns)
    return events


def _sent_ns(event: Event) -> float:
    """Whatever else comes of a request comes after it."""
    message = event[1]
    return message.sent_ns if type(message) is Execute else inf
