"""Which of the things that are kept have to go: the least recently used first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class LruBook(Generic[Key, Item]):
    """Items of known sizes that never add up to more than `limit` bytes. What it hands back is
    the caller's to let go of.

    Attributes:
        nbytes: of all that are kept.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._items: OrderedDict[Key, tuple[Item, int]] = OrderedDict()

    def get(self, key: Key) -> Item | None:
        """The item of a key, which is the most recently used one from now on."""
        kept = self._items.get(key)
        if kept is None:
            return None
        self._items.move_to_end(key)
        return kept[0]

    def add(self, key: Key, item: Item, nbytes: int) -> list[Item]:
        """Keep an item; what has to go for it: one of the same key, those used the longest ago,
        or, if it is larger than the limit, itself alone."""
        if nbytes > self._limit:
            return [item]
        gone = []
        former = self._items.pop(key, None)
        if former is not None:
            self.nbytes -= former[1]
            gone.append(former[0])
        gone += self.evict(self.nbytes + nbytes - self._limit)
        self._items[key] = item, nbytes
        self.nbytes += nbytes
        return gone

    def evict(self, nbytes: int) -> list[Item]:
        """Items of at least so many bytes together, or all there are."""
        gone = []
        while nbytes > 0 and self._items:
            _, (item, size) = self._items.popitem(last=False)
            self.nbytes -= size
            nbytes -= size
            gone.append(item)
        return gone

    def items(self) -> Iterable[tuple[Item, int]]:
        """What is kept, with its size; the least recently used first."""
        return self._items.values()

    def __len__(self) -> int:
        return len(self._items)
