"""Dynamic batching of one model of a project, which may be any step of the project's dag.

The executor's queue forms the batches (`core.scheduling.batch_queue`), as for every backend. The
waiting differs: each request of a project has a thread, which has run the steps before. Each
thread waits until a batch with its request is due. The thread that finds a batch due runs that
batch, or has a member of the batch run it. Batches of one model may overlap. Nothing runs while no
thread waits.

INVARIANT: a thread runs only the batch of its own request, so a thread whose request is still in
the queue is never busy.
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
    """A request in the queue or in a batch; the future of its result.

    Attributes:
        taken: the request has left the queue with a batch.
        to_run: the batch, if this member is to run it.
    """

    def __init__(self, message: Any, context: Any) -> None:
        super().__init__()
        self.message = message
        self.context = context
        self.taken = False
        self.to_run: list[_Member] = []

    def join(self, batch: list[_Member], runner: _Member) -> None:
        """Leave the queue with a batch, which the member `runner` runs."""
        self.taken = True
        if runner is self:
            self.to_run = batch

    def take_batch(self) -> list[_Member]:
        """Return the batch that this member is to run, once; after that an empty list."""
        batch, self.to_run = self.to_run, []
        return batch


class Batcher:
    """Batches the requests of a model.

    Args:
        run: takes lists of messages and of contexts, and returns a list of as many messages.
    """

    def __init__(self, policy: BatchPolicy, run: Run) -> None:
        self._run = run
        self._queue: BatchQueue[int, _Member] = BatchQueue(policy)
        self._changed = threading.Condition()  # guards the queue

    def infer(self, message: Any, context: Any, deadline_ns: int = 0) -> Any:
        """Run a message in a batch with other messages. Return the answer.

        Args:
            deadline_ns: time limit of the answer (CLOCK_MONOTONIC); 0: no limit.

        Raises:
            DeadlineExceeded: the batch was not done in time.
            Exception: any error of the model, for every request of the batch.
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
        """Return the batch that this member is to run. Return an empty list if the state has
        changed, or may have."""
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
        """End late requests, before a batch is taken. Return True if this member has ended."""
        late, _ = self._queue.expire(now_ns)
        if deadline_ns and now_ns >= deadline_ns and member not in late:
            late.append(member)  # runs nevertheless, for the other members of the batch
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
                if member.done():  # the deadline has passed meanwhile
                    continue
                if error is None:
                    member.set_result(results[index])
                else:
                    member.set_exception(error)
            self._changed.notify_all()
