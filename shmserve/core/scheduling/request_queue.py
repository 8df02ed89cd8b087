"""The queue of one executor: what came and has not run. Pure; the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class RequestQueue(Generic[Key, Item]):
    """First in, first out; what was cancelled or is past its deadline never runs."""

    def __init__(self) -> None:
        self._items: OrderedDict[Key, tuple[Item, int]] = OrderedDict()

    def push(self, key: Key, item: Item, deadline_ns: int) -> None:
        """Append. `deadline_ns` 0: none. `key` must not be queued already."""
        self._items[key] = (item, deadline_ns)

    def cancel(self, key: Key) -> Item | None:
        """Take an item out that has not started; None if it is not here."""
        entry = self._items.pop(key, None)
        return None if entry is None else entry[0]

    def pop(self, now_ns: int) -> tuple[Item, bool] | None:
        """The next item and whether it is still in time; None if the queue is empty."""
        if not self._items:
            return None
        _, (item, deadline_ns) = self._items.popitem(last=False)
        return item, not deadline_ns or now_ns < deadline_ns

    def pop_late(self, now_ns: int) -> tuple[Item, bool] | None:
        """As `pop`, where nothing may run: the first item that is not in time; None: all are."""
        late = (key for key, (_, end_ns) in self._items.items() if end_ns and now_ns >= end_ns)
        key = next(late, None)
        return None if key is None else (self._items.pop(key)[0], False)

    def peek(self) -> Item | None:
        """The item that `pop` would give now; None if the queue is empty."""
        return next(iter(self._items.values()))[0] if self._items else None

    def drop_where(self, is_wanted: Callable[[Key], bool]) -> list[Item]:
        """Take out every item whose key `is_wanted` (those of a connection that closed, say)."""
        return [self._items.pop(key)[0] for key in [k for k in self._items if is_wanted(k)]]

    def __iter__(self) -> Iterator[Key]:
        """The keys of everything that waits."""
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
