"""Attempt: sends a request to an executor, waits for answers, acknowledges, gives up, or tries
another executor.

A stopping executor answers every request sent before (`executor.peers.channels`). So either
sending fails, and the request goes to the successor, or the request is answered. This holds for
models that must not see a request twice as well. No answer is ever repeated, because a request is
run again only before its first answer.
"""

import os
import select
import threading
import time

from msgspec import Struct

from shmserve import errors, waiting
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.dispatch.pool.guilty_regions import explain, regions_of
from shmserve.dispatch.pool.load_balancer import LoadBalancer
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, Descriptor, Execute
from shmserve.waiting import installed

_TICK_S = 1.0  # period of checking whether the client is still there
_RESTART_LOOK_S = 0.05  # period of checking whether a restart is over
_RUNS = 2  # most runs of one request, as a request may kill executors


class Cancellation:
    """Makes a waiting call give up, from any thread, once the call has taken answers that have come
    already. Uses an event on a loop; elsewhere an eventfd, which is polled together with the
    connection."""

    def __init__(self) -> None:
        self.requested = False
        self._lock = threading.Lock()  # keeps `cancel` from writing to a closed fd
        self._fd = -1
        self._event: waiting.LoopEvent | None = None
        if installed.waiter is not None:
            self._event = installed.waiter.event()
            return
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as ex:
            raise errors.Unavailable("too many open files") from ex

    def cancel(self) -> None:
        """Wake the waiting call. Idempotent, and harmless after the end of the call."""
        with self._lock:
            self.requested = True
            if self._event is not None:
                self._event.set()
            elif self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def wait(self, connection: ExecutorConnection, timeout_s: float) -> None:
        """Wait until the connection is readable or `cancel` was called, at most `timeout_s`
        seconds."""
        waiter, channel = installed.waiter, connection.channel
        if waiter is not None and self._event is not None:
            self._event.wait(timeout_s, channel.readiness or channel.watch(waiter))
        else:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            poll.register(channel.fileno(), select.POLLIN)
            poll.poll(timeout_s * 1000)

    def close(self) -> None:
        if self._event is not None:
            return
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Attempt(Struct, eq=False):
    """A request at executors. The connection stays taken until the final answer.

    Attributes:
        _timeout_s: longest wait for an answer, in seconds, for the text of the error.
        _options: callbacks `on_wait` (called once a tick) and `on_sent`.
        deadline_ns: end of the wait for the next answer (CLOCK_MONOTONIC, nanoseconds).
        overdue: error text for a missed deadline, if not the model's slowness.
        pool: executor pool that answered.
        abandoned: true once the inputs belong to the orphaned requests.
        unfinished: connection on which further answers may come, see `leave`.
    """

    _executors: LoadBalancer
    _entry: ModelEntry
    _message: Execute
    _timeout_s: float
    _options: RunOptions
    _cancellation: Cancellation | None
    deadline_ns: int
    overdue: str = ""
    pool: ExecutorPool | None = None
    abandoned: bool = False
    unfinished: ExecutorConnection | None = None

    def first(self) -> Answer:
        """Send the request and return the first answer. If an executor dies, another may run the
        request.

        Raises:
            Unavailable, NotFound, QueueFull: no part of the request has run.
            ExecutorLost: an executor died with the request.
            DeadlineExceeded, Cancelled: the request was abandoned.
        """
        executors, message, entry = self._executors, self._message, self._entry
        tried: set[str] = _blocked(entry, message) if message.callers else set()
        runs = 0
        while True:
            try:
                pool, connection, entry = executors.connect(entry, tried, message)
            except errors.Unavailable as ex:
                try:
                    pool, connection, entry = self._after_restart(entry, tried, ex)
                except (errors.Unavailable, errors.NotFound) as last:
                    raise (self._died() if runs else last) from None
            except errors.NotFound as ex:
                raise (self._died() if runs else ex) from None
            try:
                if self._cancellation is not None and self._cancellation.requested:
                    raise errors.Cancelled("the request was cancelled")
                pool.send(connection, message)
            except (errors.Cancelled, errors.TooLarge):  # nothing was sent
                pool.give(connection)
                raise
            except errors.PeerDied:  # not received, so not counted as a run
                pool.discard(connection)
                tried.add(pool.instance.process)
                executors.departed(pool)
                continue
            except BaseException:
                # No free descriptor, for example: our record of offered segments may be ahead of
                # the executor's.
                pool.discard(connection)
                raise
            if self._options.on_sent is not None:
                self._options.on_sent()
            try:
                answer = self._wait(pool, connection)
            except (errors.PeerDied, errors.ProtocolViolation) as ex:
                tried.add(pool.instance.process)
                again = self._lost(pool, connection, ex)
                runs += 1
                if not again or runs == _RUNS or not entry.spec.rerun:
                    raise self._died() from ex
                continue
            if answer.refused and runs:  # `refused` would claim that the request never ran
                raise self._died()
            return answer

    def _after_restart(
        self, entry: ModelEntry, tried: set[str], missing: errors.Unavailable
    ) -> tuple[ExecutorPool, ExecutorConnection, ModelEntry]:
        """Wait for an executor that is being started, then connect as `LoadBalancer.connect`.
        Raise `missing` if no executor comes in time, or if `missing` has another cause."""
        if not isinstance(missing, errors.NoExecutor):
            raise missing
        executors, message = self._executors, self._message
        now = looked = time.monotonic()
        give_up = min(now + executors.restart_wait_s(), self.deadline_ns / 1e9)
        with executors.waiting(entry, message.caller_number):
            while (now := time.monotonic()) < give_up:
                waiting.sleep(_RESTART_LOOK_S)
                if self._cancellation is not None and self._cancellation.requested:
                    raise errors.Cancelled("the request was cancelled")
                if now - looked >= _TICK_S and self._options.on_wait is not None:
                    looked = now
                    if not self._options.on_wait():
                        raise errors.Cancelled("the client has gone")
                try:
                    return executors.connect(entry, tried, message)
                except errors.NoExecutor:
                    continue
        if now * 1e9 >= self.deadline_ns:
            raise self._late()
        raise missing

    def next(self, deadline_ns: int, overdue: str) -> Answer:
        """Return the next answer of an unfinished stream. Errors are as for `first`. `overdue`:
        text of the error if no answer comes until `deadline_ns`."""
        self.deadline_ns, self.overdue = deadline_ns, overdue
        pool, connection = self.pool, self.unfinished
        assert pool is not None
        assert connection is not None
        try:
            return self._wait(pool, connection)
        except (errors.PeerDied, errors.ProtocolViolation) as ex:
            self.unfinished = None
            self._lost(pool, connection, ex)
            raise self._died() from ex

    def acknowledge(self, answers: int, slots: tuple[tuple[int, int], ...]) -> None:
        """Tell the executor that answers of a stream were consumed, so as many more may be sent."""
        assert self.unfinished is not None
        try:
            message = Credit(self._message.request, answers, slots)
            self.unfinished.channel.send(messages.encode(message))
        except errors.PeerDied:  # the next receive reports the same error
            if self.pool is not None:
                self.pool.release([*slots], 0)

    def leave(self) -> None:
        """Give up further answers of a stream. Idempotent."""
        if self.unfinished is not None:
            assert self.pool is not None
            self._abandon(self.pool, self.unfinished)

    def _wait(self, pool: ExecutorPool, connection: ExecutorConnection) -> Answer:
        """Return the next answer. The connection goes back to the pool with the final answer. Raise
        DeadlineExceeded or Cancelled if the request was abandoned, and errors of the channel."""
        message, cancellation, on_wait = self._message, self._cancellation, self._options.on_wait
        answer: Answer | None = None
        try:
            while answer is None:
                remaining_s = (self.deadline_ns - time.monotonic_ns()) / 1e9
                if remaining_s <= 0:
                    raise self._late()
                tick_s = min(_TICK_S, max(remaining_s, 0.001))
                if cancellation is not None:
                    cancellation.wait(connection, tick_s)
                    tick_s = 0.0
                received = connection.channel.receive_within(tick_s)
                if received is not None:
                    answer = pool.take(connection, *received)
                elif cancellation is not None and cancellation.requested:
                    raise errors.Cancelled("the request was cancelled")
                elif on_wait is not None and not on_wait():
                    raise errors.Cancelled("the client has gone")
            if answer.request != message.request or not (answer.final or message.credit):
                raise errors.ProtocolViolation("an answer to something that was not asked")
        except (errors.PeerDied, errors.ProtocolViolation):
            raise
        except BaseException:  # the executor may still read the slots, so abandon them
            self._abandon(pool, connection)
            raise
        self.pool = pool
        if answer.final:
            self.unfinished = None
            pool.give(connection)
        else:
            self.unfinished = connection
        return answer

    def _late(self) -> errors.DeadlineExceeded:
        name, limit_s = self._entry.spec.name, self._timeout_s
        return errors.DeadlineExceeded(
            self.overdue or f"model '{name}' gave no answer within {limit_s:g} s"
        )

    def _lost(
        self, pool: ExecutorPool, connection: ExecutorConnection, ex: errors.ShmserveError
    ) -> bool:
        """Take in an executor's failure during the request. Return True if another executor may
        run the request. Raise InvalidArgument if a client's region was the cause."""
        pool.discard(connection)
        self._executors.lost(pool, ex)
        regions = regions_of(self._message)
        if regions:  # a region may be the cause; never run such a request again
            explain(self._executors.registry, regions)
        return not regions

    def _died(self) -> errors.ExecutorLost:
        return errors.ExecutorLost(
            f"the executor of model '{self._entry.spec.name}' died while it had the "
            "request; it is being restarted"
        )

    def _abandon(self, pool: ExecutorPool, connection: ExecutorConnection) -> None:
        """Give up waiting. The slots stay leased until the late answer."""
        self.unfinished = None
        self.abandoned = True
        try:
            connection.channel.send(messages.encode(Cancel(self._message.request)))
        except errors.PeerDied:
            pass  # EOF will be seen next
        inputs = [tensor.at for tensor in self._message.inputs]
        leases = [(at.slot, at.generation) for at in inputs if isinstance(at, Descriptor)]
        self._executors.orphans.keep(pool, connection, self._message.request, leases)


def _blocked(entry: ModelEntry, message: Execute) -> set[str]:
    """Return executors that cannot run the request because they wait for its answer."""
    blocked = {caller.process for caller in message.callers if caller.blocked}
    instances = [instance.process for instance in entry.instances]
    if instances and blocked.issuperset(instances):
        way = " -> ".join([*(caller.model for caller in message.callers), entry.spec.name])
        raise errors.NotConfigured(
            f"model '{entry.spec.name}' cannot be called: all its instances wait for this very"
            f" call ({way})"
        )
    return blocked
