"""Record of the shared memory that this process has mapped, for a GPU's driver.

Before a copy, the driver must know the mapping. Pure bookkeeping, on any thread. Models may keep
views of a mapping beyond `unmapping`: the views stay valid, but the driver no longer knows the
memory.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shmserve.shm.segment import WritableMapping


class Mapped(NamedTuple):
    """A mapping of `size` bytes from `address`. `writable`: False for a peer's memory. `again`:
    maps a peer's memory once more, for writing; None: not possible."""

    address: int
    size: int
    writable: bool
    again: Callable[[], WritableMapping] | None = None


class Mappings:
    """The mappings of one process in which tensors lie. `pins_writable_only`: the GPU's driver pins
    only writable memory, so every mapping of a peer's memory needs `again`."""

    def __init__(self) -> None:
        self.pins_writable_only = False
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted
        self._by_address: dict[int, Mapped] = {}
        self._listener: Callable[[Mapped], None] | None = None

    def listen(self, listener: Callable[[Mapped], None], pins_writable_only: bool = False) -> None:
        """Call `listener` with each mapping shortly before the memory is unmapped."""
        self._listener = listener
        self.pins_writable_only = pins_writable_only

    def mapped(
        self,
        address: int,
        size: int,
        writable: bool,
        again: Callable[[], WritableMapping] | None = None,
    ) -> None:
        with self._lock:
            if address not in self._by_address:
                bisect.insort(self._starts, address)
            self._by_address[address] = Mapped(address, size, writable, again)

    def unmapping(self, address: int) -> None:
        """Remove a mapping, which is about to end. Unknown addresses are ignored."""
        with self._lock:
            mapping = self._by_address.pop(address, None)
            if mapping is not None:
                self._starts.remove(address)
        if mapping is not None and self._listener is not None:
            self._listener(mapping)

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return the mapping that contains all of these bytes, or None."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            mapping = self._by_address[self._starts[index]] if index >= 0 else None
        if mapping is None or address + nbytes > mapping.address + mapping.size:
            return None
        return mapping

    def __len__(self) -> int:
        return len(self._by_address)
