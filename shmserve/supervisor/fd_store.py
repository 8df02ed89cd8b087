"""Descriptors kept for the coordinator's successor: client regions, pages of counters.

With these descriptors, regions outlive the coordinator. If supervisor and coordinator die
together, the next coordinator opens the objects again by their keys. It drops a region whose
object has another inode, and a sealed region, which has no key, and logs a line for each.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from shmserve.protocol.control.messages import ToCoordinator
from shmserve.transport.channel import MAX_FDS
from shmserve.transport.link import Link

Key = TypeVar("Key", bound=Hashable)


class FdStore(Generic[Key]):
    """Descriptors by key, such as a region's number. Thread-safe: the link's thread fills the
    store. `stored`: makes the message that hands descriptors over, from their keys and a flag that
    more messages follow."""

    def __init__(self, stored: Callable[[tuple[Key, ...], bool], ToCoordinator]) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        self._fds: dict[Key, int] = {}

    @property
    def fds(self) -> dict[Key, int]:
        """Return a copy of the table of descriptors, by key."""
        return dict(self._fds)

    def keep(self, keys: Sequence[Key], fds: Sequence[int]) -> None:
        with self._lock:
            for key, fd in zip(keys, fds, strict=False):
                if key in self._fds:
                    os.close(fd)
                else:
                    self._fds[key] = fd

    def drop(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                fd = self._fds.pop(key, None)
                if fd is not None:
                    os.close(fd)

    def hand_over(self, link: Link, others: Sequence[Key] = ()) -> None:
        """Send a coordinator copies of all descriptors, from a callback of the link, and `others`,
        keys without one. The last message is empty and says so. Raises as `Link.flush`."""
        with self._lock:
            keys = list(self._fds)
            for start in range(0, len(keys), MAX_FDS):
                part = keys[start : start + MAX_FDS]
                link.send(self._stored(tuple(part), True), [self._fds[key] for key in part])
                link.flush()  # copies of thousands of descriptors at once would exceed the limit
        for start in range(0, len(others), MAX_FDS):
            link.send(self._stored(tuple(others[start : start + MAX_FDS]), True))
        link.send(self._stored((), False))

    def __len__(self) -> int:
        return len(self._fds)
