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
from collections.abc import Callable, Hashable, Iterator, Set
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class RequestQueue(Generic[Key, Item]):
    """First in, first out of each caller; what was cancelled or is past its deadline never
    runs.

    Attributes:
        waiting: the caller of everything that waits, by key, as it came; only to be read.
    """

    def __init__(self) -> None:
        # By caller, whose turn is next first; none of them is empty
        self._lines: OrderedDict[int, OrderedDict[Key, tuple[Item, int]]] = OrderedDict()
        self.waiting: dict[Key, int] = {}

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

    def pop(self, now_ns: int) -> tuple[Item, bool] | None:
        """The next item and whether it is still in time; None if the queue is empty."""
        if not self._lines:
            return None
        caller = next(iter(self._lines))
        line = self._lines[caller]
        key, (item, deadline_ns) = line.popitem(last=False)
        del self.waiting[key]
        if line:
            self._lines.move_to_end(caller)
        else:
            del self._lines[caller]
        return item, not deadline_ns or now_ns < deadline_ns

    def pop_late(self, now_ns: int) -> tuple[Item, bool] | None:
        """As `pop`, where nothing may run: an item that is not in time; None: all are."""
        for line in self._lines.values():
            for key, (item, end_ns) in line.items():
                if end_ns and now_ns >= end_ns:
                    self.cancel(key)
                    return item, False
        return None

    def peek(self) -> Item | None:
        """The item that `pop` would give now; None if the queue is empty."""
        for line in self._lines.values():
            return next(iter(line.values()))[0]
        return None

    def in_turn(self, out: Set[int] = frozenset()) -> Iterator[Item]:
        """Everything that waits, in the order in which `pop` would give it, were nothing to come
        or go. The queue must not change meanwhile; what is left of callers in `out`, which may,
        is passed over."""
        lines = deque((caller, iter(line.values())) for caller, line in self._lines.items())
        while lines:
            caller, line = lines.popleft()
            for item, _ in line if caller not in out else ():
                yield item
                lines.append((caller, line))
                break

    def drop_where(self, is_wanted: Callable[[Key], bool]) -> list[Item]:
        """Take out every item whose key `is_wanted` (those of a connection that closed, say)."""
        gone = [self.cancel(key) for key in [k for k in self.waiting if is_wanted(k)]]
        return [item for item in gone if item is not None]

    def __iter__(self) -> Iterator[Key]:
        """The keys of everything that waits, as it came."""
        return iter(self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)
