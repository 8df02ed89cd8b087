"""The queue of one executor: what came and has not run. Pure; the clock is an argument.

Callers take turns: of each that has something here one request runs, the oldest, before the next
of any other. So whoever has one waiting waits for one of each other caller's, however many those
have; with a single caller it is first in, first out.

Invariants (tests/property/test_request_queue_properties.py):
- a caller's requests come out in the order in which they came in;
- between two of one caller's comes at most one of each other's;
- what was pushed comes out once, by whatever way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence, Set
from typing import Any, Generic

from shmserve.core.scheduling.scheduler import NEVER_NS, Item, Key, Turn

_NOTHING: Turn[Any] = Turn()


class RequestQueue(Generic[Key, Item]):
    """A scheduler (`scheduler.Scheduler`): first in, first out of each caller.

    Attributes:
        waiting: the caller of each waiting request, by key, in order of arrival; only to be read.
        next_end_ns: no waiting request's deadline passes before this time.
    """

    def __init__(self) -> None:
        # By caller, whose turn is next first; none of them is empty
        self._lines: OrderedDict[int, OrderedDict[Key, tuple[Item, int]]] = OrderedDict()
        self.waiting: dict[Key, int] = {}
        self.next_end_ns = NEVER_NS

    def push(self, key: Key, item: Item, deadline_ns: int = 0, caller: int = 0) -> None:
        """Append. `deadline_ns` 0: none. `caller`: whose it is; 0: nobody knows. `key` must not
        be queued already."""
        if key in self.waiting:  # of a peer that breaks this rule the latest counts
            self.cancel(key)
        self.waiting[key] = caller
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = OrderedDict()
        line[key] = (item, deadline_ns)
        if 0 < deadline_ns < self.next_end_ns:
            self.next_end_ns = deadline_ns

    def cancel(self, key: Key) -> Item | None:
        """Take an item out that has not started; None if it is not here. Nobody's turn passes."""
        caller = self.waiting.pop(key, None)
        if caller is None:
            return None
        line = self._lines[caller]
        item, _ = line.pop(key)
        if not line:
            del self._lines[caller]
        return item

    def take(self, key: Key) -> Item | None:
        """As `cancel`, of an item that starts: it was its caller's turn."""
        caller = self.waiting.get(key)
        if caller is not None:
            self._lines.move_to_end(caller)
        return self.cancel(key)

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Take out the next request, if one may run, and all late ones."""
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
        """Take out, and return, all requests whose deadline has passed. None are ever rejected."""
        late: list[Item] = []
        if now_ns >= self.next_end_ns:
            ends_ns = {k: ns for line in self._lines.values() for k, (_, ns) in line.items() if ns}
            for key, end_ns in ends_ns.items():
                if now_ns >= end_ns and (item := self.cancel(key)) is not None:
                    late.append(item)
            self.next_end_ns = min((ns for ns in ends_ns.values() if ns > now_ns), default=NEVER_NS)
        return late, []

    def peek(self) -> Item | None:
        """The item that `next` would run now; None if the queue is empty."""
        for line in self._lines.values():
            return next(iter(line.values()))[0]
        return None

    def in_turn(self, out: Set[int] = frozenset()) -> Iterator[Item]:
        """Everything that waits, in the order in which `next` would run it, were nothing to come
        or go. The queue must not change meanwhile; what is left of callers in `out`, which may,
        is passed over."""
        lines = deque((caller, iter(line.values())) for caller, line in self._lines.items())
        while lines:
            caller, line = lines.popleft()
            for item, _ in line if caller not in out else ():
                yield item
                lines.append((caller, line))
                break
