"""Batch queue: waiting requests and the choice of the next batch. Pure; the clock is an argument.

Decides as Triton's dynamic batcher: a batch is a beginning of the queue, most urgent level first,
of compatible requests (equal `Waiting.kind`). A batch of a preferred size goes at once, and so
does a batch that cannot grow. A smaller batch waits until its oldest request has waited for the
policy's delay. Without a delay all waiting requests go.

Within a level callers take turns, as `request_queue` describes. A caller whose next request does
not fit into the batch is skipped: other callers fill the batch, and the next batch begins with the
skipped caller.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Set
from typing import Generic

from msgspec import Struct

from shmserve.core.scheduling.batch_policy import BatchPolicy, QueuePolicy
from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn


class Waiting(Struct, Generic[Key, Item]):
    """Request in the queue. Times are nanoseconds of one clock.

    Attributes:
        rows: number of batch elements, at least 1.
        kind: value that all requests of a batch share.
        arrived_ns: time of arrival.
        deadline_ns: time from which the result is useless; 0: none.
        expires_ns: time at which the request has waited longer than its policy allows; 0: never.
        caller: number of the caller, as in `RequestQueue`.
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
        """Limit the waiting time of the request. 0: no limit."""
        self.expires_ns = self.arrived_ns + timeout_ns if timeout_ns else 0


class _Level(Generic[Key, Item]):
    """Requests of one priority: requests in time, by turns, then delayed requests in order of
    delay."""

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
        """Move a request which waited too long behind the requests in time, without further time
        limit."""
        waiting.expire_after(0)
        self.delayed[waiting.key] = self.remove(waiting.key)

    def take(self, key: Key) -> Waiting[Key, Item]:
        """Remove and return a request which runs now."""
        return self.in_time.take(key) or self.delayed.pop(key)


class BatchQueue(Generic[Key, Item]):
    """Scheduler (`scheduler.Scheduler`) of batches. `waiting`: level of each waiting request, by
    key, in order of arrival. `next_end_ns`: no deadline or time limit of a waiting request passes
    before this time."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._levels: list[_Level[Key, Item]] = [_Level(p) for p in policy.levels]
        self._largest_preferred = max(policy.preferred, default=policy.max_size)
        self.waiting: dict[Key, _Level[Key, Item]] = {}
        self.next_end_ns = NEVER_NS

    def push(self, waiting: Waiting[Key, Item], priority: object = 0, timeout_ns: int = 0) -> bool:
        """Append a request; return False if its level is full. `priority` and `timeout_ns` are the
        request's own wishes, which the policy may grant."""
        level = self._levels[self._policy.level_of(priority)]
        policy = level.policy
        if policy.max_size and len(level) >= policy.max_size:
            return False
        if timeout_ns := policy.timeout_of(timeout_ns):
            waiting.expire_after(timeout_ns)
        # a peer that reuses a key breaks the protocol; keep the latest request
        if waiting.key in self.waiting:
            self.cancel(waiting.key)
        self.waiting[waiting.key] = level
        level.in_time.push(waiting.key, waiting, caller=waiting.caller)
        self.next_end_ns = min(self.next_end_ns, _first_end(waiting))
        return True

    def cancel(self, key: Key) -> Item | None:
        """Remove and return a waiting item; return None if the key is not waiting."""
        level = self.waiting.pop(key, None)
        return None if level is None else level.remove(key).item

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Return the batch to run now, and the late and rejected requests. `hurry`: no further
        request will come, so the batch does not wait. Without `may_run` the batch stays and may
        grow."""
        late, rejected = self.expire(now_ns)
        chosen, at_ns = self._choose(now_ns, hurry)
        batch = chosen if may_run else []
        for waiting in batch:
            self.waiting.pop(waiting.key).take(waiting.key)
        soonest = min(at_ns, self.next_end_ns)
        wait_ns = None if soonest == NEVER_NS else max(0, soonest - now_ns)
        return Turn([w.item for w in batch], late, rejected, wait_ns, bool(chosen))

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Remove and return late requests, and requests rejected for waiting too long. Where the
        policy delays instead, such requests move back."""
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
        """Return the batch to run now, or an empty batch and the time at which a batch is due
        without further arrivals."""
        policy = self._policy
        batch: list[Waiting[Key, Item]] = []
        rows = 0
        best = 0  # number of requests in the largest batch of a preferred size
        out: set[int] = set()  # callers whose next request does not fit
        for waiting in self._all(out):
            if batch:
                if not best and rows + waiting.rows > self._largest_preferred:
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
        if out or is_due or hurry or not policy.max_delay_ns or rows >= self._largest_preferred:
            return batch, NEVER_NS
        return [], due_ns

    def _all(self, out: Set[int] = frozenset()) -> Iterator[Waiting[Key, Item]]:
        """Yield waiting requests in the order in which to run them. Once a caller is in `out`,
        yield only requests of other callers with turns on the same level, and no less urgent
        level."""
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
