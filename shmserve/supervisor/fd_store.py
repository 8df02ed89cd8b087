"""Descriptors of client regions, kept for the coordinator's successor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from shmserve.protocol.region_messages import StoredRegions
from shmserve.transport.channel import MAX_FDS
from shmserve.transport.link import Link


class FdStore:
    """By region number. Thread-safe: the link's thread fills it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}

    def keep(self, numbers: Sequence[int], fds: Sequence[int]) -> None:
        """Take over descriptors."""
        with self._lock:
            for number, fd in zip(numbers, fds, strict=False):
                if number in self._fds:
                    os.close(fd)
                else:
                    self._fds[number] = fd

    def drop(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                fd = self._fds.pop(number, None)
                if fd is not None:
                    os.close(fd)

    def hand_over(self, link: Link) -> None:
        """Give a coordinator copies of all; the last message says that it is the last."""
        with self._lock:
            numbers = list(self._fds)
            for start in range(0, len(numbers), MAX_FDS):
                part = numbers[start : start + MAX_FDS]
                link.send(StoredRegions(tuple(part), more=True), [self._fds[n] for n in part])
        link.send(StoredRegions(()))

    def __len__(self) -> int:
        return len(self._fds)
