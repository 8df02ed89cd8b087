"""Request queue: the waiting requests of one executor. Pure; the clock is an argument.

Callers take turns: each turn runs the oldest request of one caller. So the next request of a
caller waits for at most one request of each other caller. With a single caller the queue is first
in, first out.

Invariants (tests/property/test_request_queue_properties.py):
- a caller's requests leave in order of arrival;
- between two requests of one caller, at most one request of each other caller leaves;
- every pushed request leaves exactly once, by any method.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence, Set
from typing import Any, Generic

from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn

_NOTHING: Turn[Any] = Turn()


class RequestQueue(Generic[Key, Item]):
    """Scheduler (`scheduler.Scheduler`): first in, first out for each caller. `waiting`: caller of
    each waiting request, by key, in order of arrival; read-only. `next_end_ns`: no waiting
    request's deadline passes before this time."""

    def __init__(self) -> None:
        # caller -> its requests; the next caller's turn first; no caller without requests
        self._lines: OrderedDict[int, OrderedDict[Key, tuple[Item, int]]] = OrderedDict()
        self.waiting: dict[Key, int] = {}
        self.next_end_ns = NEVER_NS

    def push(self, key: Key, item: Item, deadline_ns: int = 0, caller: int = 0) -> None:
        """Append a request. `deadline_ns` 0: none. `caller`: caller number; 0: unknown. `key` must
        not be queued already."""
        # a peer that reuses a key breaks the protocol; keep the latest request
        if key in self.waiting:
            self.cancel(key)
        self.waiting[key] = caller
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = OrderedDict()
        line[key] = (item, deadline_ns)
        if 0 < deadline_ns < self.next_end_ns:
            self.next_end_ns = deadline_ns

    def cancel(self, key: Key) -> Item | None:
        """Remove and return a waiting item; return None if the key is not waiting. The order of
        turns stays."""
        caller = self.waiting.pop(key, None)
        if caller is None:
            return None
        line = self._lines[caller]
        item, _ = line.pop(key)
        if not line:
            del self._lines[caller]
        return item

    def take(self, key: Key) -> Item | None:
        """Remove and return an item which starts now. Uses up the caller's turn."""
        caller = self.waiting.get(key)
        if caller is not None:
            self._lines.move_to_end(caller)
        return self.cancel(key)

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Remove and return the next request, if a request may run, and all late requests."""
        late: Sequence[Item] = ()
        if now_ns >= self.next_end_ns:
            late, _ = self.expire(now_ns)
        if not self._lines:
            return Turn(late=late) if late else _NOTHING
        if not may_run:
            end_ns = self.next_end_ns
            return Turn((), late, (), None if end_ns == NEVER_NS else end_ns - now_ns, True)
        caller = next(iter(self._lines))
        line = self._lines[caller]
        key, (item, _) = line.popitem(last=False)
        del self.waiting[key]
        if line:
            self._lines.move_to_end(caller)
        else:
            del self._lines[caller]
        return Turn((item,), late, is_due=True)

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Remove and return all requests past their deadline. No request is ever rejected."""
        late: list[Item] = []
        if now_ns >= self.next_end_ns:
            ends_ns = {k: ns for line in self._lines.values() for k, (_, ns) in line.items() if ns}
            for key, end_ns in ends_ns.items():
                if now_ns >= end_ns and (item := self.cancel(key)) is not None:
                    late.append(item)
            self.next_end_ns = min((ns for ns in ends_ns.values() if ns > now_ns), default=NEVER_NS)
        return late, []

    def peek(self) -> Item | None:
        """Return the item that `next` would run now, or None if the queue is empty."""
        for line in self._lines.values():
            return next(iter(line.values()))[0]
        return None

    def in_turn(self, out: Set[int] = frozenset()) -> Iterator[Item]:
        """Yield all waiting items in the order in which `next` would run them without arrivals or
        cancellations.

        The queue must not change during the iteration. Callers in `out` are skipped; `out` may
        grow meanwhile.
        """
        lines = deque((caller, iter(line.values())) for caller, line in self._lines.items())
        while lines:
            caller, line = lines.popleft()
            for item, _ in line if caller not in out else ():
                yield item
                lines.append((caller, line))
                break
