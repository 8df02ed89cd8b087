"""Which shared memory this process has mapped: what a GPU's driver must know before it copies.

Pure bookkeeping, on any thread. Models may keep views of a mapping beyond `unmapping`: they
stay valid, only the driver has let go of it.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shmserve.shm.segment import WritableMapping


class Mapped(NamedTuple):
    """`size` bytes from `address`; not `writable`: a peer's.

    `again` maps a peer's once more, for writing; None: it cannot be.
    """

    address: int
    size: int
    writable: bool
    again: Callable[[], WritableMapping] | None = None


class Mappings:
    """The mappings of one process that tensors lie in.

    Attributes:
        pins_writable_only: its GPU's driver pins no other memory, so whoever maps a peer's must
            be able to do that `again`.
    """

    def __init__(self) -> None:
        self.pins_writable_only = False
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted
        self._known: dict[int, Mapped] = {}
        self._listener: Callable[[Mapped], None] | None = None

    def listen(self, listener: Callable[[Mapped], None], pins_writable_only: bool = False) -> None:
        """Have a driver's side told of each mapping right before it is given up."""
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
            if address not in self._known:
                bisect.insort(self._starts, address)
            self._known[address] = Mapped(address, size, writable, again)

    def unmapping(self, address: int) -> None:
        """It is given up; unknown ones are nothing."""
        with self._lock:
            mapping = self._known.pop(address, None)
            if mapping is not None:
                self._starts.remove(address)
        if mapping is not None and self._listener is not None:
            self._listener(mapping)

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """The mapping that these bytes lie in as a whole."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            mapping = self._known[self._starts[at]] if at >= 0 else None
        if mapping is None or address + nbytes > mapping.address + mapping.size:
            return None
        return mapping

    def __len__(self) -> int:
        return len(self._known)
