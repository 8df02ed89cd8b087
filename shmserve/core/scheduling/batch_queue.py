"""What waits for a batch, and which of it is the next one. Pure; the clock is an argument.

As Triton's dynamic batcher decides: a batch is a beginning of the queue, most urgent level first,
of requests that agree (`Waiting.kind`). One of a preferred size goes at once, and so does one
that cannot grow; a smaller one waits for others until its oldest request has waited as long as
the policy allows. Without such a delay whatever is there goes.

On a level callers take turns, as `request_queue` says. Whoever's next request does not fit into the
batch sits it out, with all behind it: the batch is filled with the others', and the one after it
begins with his.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Set
from typing import Generic

from msgspec import Struct

from shmserve.core.scheduling.batch_policy import BatchPolicy, QueuePolicy
from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn


class Waiting(Struct, Generic[Key, Item]):
    """A request in the queue. Times are nanoseconds of one clock.

    Attributes:
        rows: how many elements of a batch it is, at least 1.
        kind: what must be equal in a batch.
        arrived_ns: since when it waits.
        deadline_ns: nobody wants it from then on; 0: none.
        expires_ns: it has waited longer than its policy allows; 0: never.
        caller: whose it is, as `RequestQueue` has it.
    """

    key: Key
    item: Item
    rows: int
    kind: Hashable
    arrived_ns: int
    deadline_ns: int = 0
    expires_ns: int = 0
    caller: int = 0

    def expire_after(self, timeout_ns: int) -> None:
        """Limit the time that the request may wait. 0: no limit."""
        self.expires_ns = self.arrived_ns + timeout_ns if timeout_ns else 0


class _Level(Generic[Key, Item]):
    """One priority: those in time by turns, then those that were too slow, as they came."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.in_time: RequestQueue[Key, Waiting[Key, Item]] = RequestQueue()
        self.delayed: OrderedDict[Key, Waiting[Key, Item]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time.waiting) + len(self.delayed)

    def all(self) -> Iterator[Waiting[Key, Item]]:
        yield from self.in_time.in_turn()
        yield from self.delayed.values()

    def remove(self, key: Key) -> Waiting[Key, Item]:
        return self.in_time.cancel(key) or self.delayed.pop(key)

    def delay(self, waiting: Waiting[Key, Item]) -> None:
        """Put a request that was too slow behind those in time; it expires no more."""
        waiting.expire_after(0)
        self.delayed[waiting.key] = self.remove(waiting.key)

    def take(self, key: Key) -> Waiting[Key, Item]:
        """Take out a request that runs now."""
        return self.in_time.take(key) or self.delayed.pop(key)


class BatchQueue(Generic[Key, Item]):
    """A scheduler (`scheduler.Scheduler`) of batches.

    Attributes:
        waiting: the level of each waiting request, by key, in order of arrival.
        next_end_ns: nothing is past its deadline, or has waited too long, before.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: list[_Level[Key, Item]] = [_Level(p) for p in policy.levels]
        self._most_wanted = max(policy.preferred, default=policy.max_size)
        self.waiting: dict[Key, _Level[Key, Item]] = {}
        self.next_end_ns = NEVER_NS

    def push(self, waiting: Waiting[Key, Item], priority: object = 0, timeout_ns: int = 0) -> bool:
        """Append what is not here yet; False: its level is full. `priority` and `timeout_ns` are
        what the request asks for, which the policy may allow."""
        level = self._levels[self._policy.level_of(priority)]
        policy = level.policy
        if policy.max_size and len(level) >= policy.max_size:
            return False
        if timeout_ns := policy.timeout_of(timeout_ns):
            waiting.expire_after(timeout_ns)
        if waiting.key in self.waiting:  # of a peer that breaks this rule the latest counts
            self.cancel(waiting.key)
        self.waiting[waiting.key] = level
        level.in_time.push(waiting.key, waiting, caller=waiting.caller)
        self.next_end_ns = min(self.next_end_ns, _first_end(waiting))
        return True

    def cancel(self, key: Key) -> Item | None:
        """Take an item out that has not started; None if it is not here."""
        level = self.waiting.pop(key, None)
        return None if level is None else level.remove(key).item

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """The next batch if it is to run now, and what never will. `hurry`: no more will come,
        so it waits for nothing. Unless it `may_run` it stays, and may grow."""
        late, rejected = self.expire(now_ns)
        chosen, at_ns = self._choose(now_ns, hurry)
        batch = chosen if may_run else []
        for waiting in batch:
            self.waiting.pop(waiting.key).take(waiting.key)
        soonest = min(at_ns, self.next_end_ns)
        wait_ns = None if soonest == NEVER_NS else max(0, soonest - now_ns)
        return Turn([w.item for w in batch], late, rejected, wait_ns, bool(chosen))

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Take out what is past its deadline, and what has waited too long and is rejected for
        it; what is delayed for it steps back."""
        late: list[Item] = []
        rejected: list[Item] = []
        if now_ns < self.next_end_ns:
            return late, rejected
        for level in self._levels:
            for waiting in list(level.all()):
                if waiting.deadline_ns and now_ns >= waiting.deadline_ns:
                    late.append(waiting.item)
                elif not (waiting.expires_ns and now_ns >= waiting.expires_ns):
                    continue
                elif level.policy.delays:
                    level.delay(waiting)
                    continue
                else:
                    rejected.append(waiting.item)
                self.cancel(waiting.key)
        self.next_end_ns = min(map(_first_end, self._all()), default=NEVER_NS)
        return late, rejected

    def _choose(self, now_ns: int, hurry: bool) -> tuple[list[Waiting[Key, Item]], int]:
        """The batch to run now; empty: when one will be due without another arrival."""
        policy = self._policy
        batch: list[Waiting[Key, Item]] = []
        rows = 0
        best = 0  # how many requests make the largest batch of a preferred size
        out: set[int] = set()  # callers whose next request does not fit
        for waiting in self._all(out):
            if batch:
                if not best and rows + waiting.rows > self._most_wanted:
                    best = len(batch)
                if rows + waiting.rows > policy.max_size or waiting.kind != batch[0].kind:
                    out.add(waiting.caller)
                    continue
            batch.append(waiting)
            rows += waiting.rows
            if rows in policy.preferred:
                best = len(batch)
        if not batch:
            return batch, NEVER_NS
        due_ns = min(waiting.arrived_ns for waiting in batch) + policy.max_delay_ns
        is_due = policy.max_delay_ns > 0 and now_ns >= due_ns
        if best and not is_due:
            return batch[:best], NEVER_NS
        if out or is_due or hurry or not policy.max_delay_ns or rows >= self._most_wanted:
            return batch, NEVER_NS
        return [], due_ns

    def _all(self, out: Set[int] = frozenset()) -> Iterator[Waiting[Key, Item]]:
        """In the order in which they are to run. Once a caller is in `out` there are only those
        of others who have turns beside him, and none less urgent."""
        for level in self._levels:
            yield from level.in_time.in_turn(out)
            for waiting in level.delayed.values():
                if out:
                    return
                yield waiting
            if out:
                return


def _first_end(waiting: Waiting[Key, Item]) -> int:
    return min(waiting.deadline_ns or NEVER_NS, waiting.expires_ns or NEVER_NS)
