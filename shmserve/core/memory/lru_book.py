"""LRU book: decides which kept items to drop, the least recently used first. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class LruBook(Generic[Key, Item]):
    """Items of known sizes, at most `limit` bytes together. The caller releases items that are
    returned as dropped. `nbytes`: bytes of all kept items."""

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._items: OrderedDict[Key, tuple[Item, int]] = OrderedDict()

    def get(self, key: Key) -> Item | None:
        """Return the item of a key, or None, and mark the item as the most recently used."""
        kept = self._items.get(key)
        if kept is None:
            return None
        self._items.move_to_end(key)
        return kept[0]

    def add(self, key: Key, item: Item, nbytes: int) -> list[Item]:
        """Keep an item; return the dropped items: the former item of the key, and the least
        recently used. An item larger than the limit is itself dropped, alone."""
        if nbytes > self._limit:
            return [item]
        dropped = []
        former = self._items.pop(key, None)
        if former is not None:
            self.nbytes -= former[1]
            dropped.append(former[0])
        dropped += self.evict(self.nbytes + nbytes - self._limit)
        self._items[key] = item, nbytes
        self.nbytes += nbytes
        return dropped

    def evict(self, nbytes: int) -> list[Item]:
        """Drop and return the least recently used items, of at least `nbytes` bytes together, or
        all items."""
        dropped = []
        while nbytes > 0 and self._items:
            _, (item, size) = self._items.popitem(last=False)
            self.nbytes -= size
            nbytes -= size
            dropped.append(item)
        return dropped

    def items(self) -> Iterable[tuple[Item, int]]:
        """Return (item, size) pairs, the least recently used first."""
        return self._items.values()

    def __len__(self) -> int:
        return len(self._items)
