"""Dynamic batching of one model of a project, which may be any step of its dag.

The executor's queue decides (`core.scheduling.batch_queue`), as for every backend; only who waits
differs: requests of a project have threads of their own, each of which has run the steps before.
So each waits for its batch to be due, and the one that finds it due runs it for all, or has one of
its members run it; batches of one model may overlap, and nothing runs while nobody asks.

INVARIANT: a thread runs the batch of its own request alone, so who waits in the queue is free to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.core.scheduling.batch_queue import BatchQueue, Waiting
from shmserve.errors import DeadlineExceeded, Internal

Run = Callable[[list[Any], list[Any]], list[Any]]


class _Member(Future[Any]):
    """A request and, later, what came of it.

    Attributes:
        taken: it is out of the queue, in a batch.
        to_run: that batch, if this one is to run it.
    """

    def __init__(self, message: Any, context: Any) -> None:
        super().__init__()
        self.message = message
        self.context = context
        self.taken = False
        self.to_run: list[_Member] = []

    def join(self, batch: list[_Member], runner: _Member) -> None:
        """Leave the queue with a batch, which one of the members runs."""
        self.taken = True
        if runner is self:
            self.to_run = batch

    def take_batch(self) -> list[_Member]:
        """Return the batch that this member is to run, once; after that nothing."""
        batch, self.to_run = self.to_run, []
        return batch


class Batcher:
    """`run` takes lists of messages and contexts and gives as many messages."""

    def __init__(self, policy: BatchPolicy, run: Run) -> None:
        self._run = run
        self._queue: BatchQueue[int, _Member] = BatchQueue(policy)
        self._changed = threading.Condition()  # guards the queue

    def infer(self, message: Any, context: Any, deadline_ns: int = 0) -> Any:
        """The answer to one message, which runs with others. `deadline_ns`: nobody wants it from
        then on; 0: none.

        Raises:
            DeadlineExceeded: the batch was not done in time.
            Exception: whatever the model raised, for every request of the batch.
        """
        member = _Member(message, context)
        now_ns = time.monotonic_ns()
        with self._changed:
            self._queue.push(Waiting(id(member), member, 1, None, now_ns, deadline_ns))
        while not member.done():
            batch = self._next(member, deadline_ns)
            if batch:
                self._serve(batch)
        return member.result()

    def _next(self, member: _Member, deadline_ns: int) -> list[_Member]:
        """The batch that this member is to run; none: something has changed, or may have."""
        with self._changed:
            batch = member.take_batch()
            if batch or member.done():
                return batch
            now_ns = time.monotonic_ns()
            if self._tell_late(member, now_ns, deadline_ns):
                return []
            turn = None if member.taken else self._queue.next(now_ns)
            if turn is not None and turn.batch:
                batch = [*turn.batch]
                runner = member if member in batch else batch[0]
                for each in batch:
                    each.join(batch, runner)
                if runner is not member:
                    self._changed.notify_all()
                return member.take_batch()
            until_ns = [turn.wait_ns] if turn is not None and turn.wait_ns is not None else []
            if deadline_ns:
                until_ns.append(deadline_ns - now_ns)
            self._changed.wait(min(until_ns) / 1e9 if until_ns else None)
            return []

    def _tell_late(self, member: _Member, now_ns: int, deadline_ns: int) -> bool:
        """End what is late by now, before a batch is taken; whether this member is."""
        late, _ = self._queue.expire(now_ns)
        if deadline_ns and now_ns >= deadline_ns and member not in late:
            late.append(member)  # it runs, for the others of its batch
        for overdue in late:
            overdue.set_exception(DeadlineExceeded("the batch of the request was not done in time"))
        if late:
            self._changed.notify_all()
        return member.done()

    def _serve(self, batch: list[_Member]) -> None:
        error: BaseException | None = None
        results: list[Any] = []
        try:
            results = self._run([m.message for m in batch], [m.context for m in batch])
            if len(results) != len(batch):
                raise Internal(f"a batch of {len(batch)} gave {len(results)} messages")
        except BaseException as ex:
            error = ex
        with self._changed:
            for index, member in enumerate(batch):
                if member.done():  # its deadline has passed meanwhile
                    continue
                if error is None:
                    member.set_result(results[index])
                else:
                    member.set_exception(error)
            self._changed.notify_all()
