"""Tombstones: unregistered regions, kept briefly for requests already accepted."""

import os
from collections import OrderedDict

from shmserve.core.registry import Region

_KEEP_S = 10.0
_MAX_KEPT = 256


class Tombstones:
    """Unregistered regions by number, oldest first. The class owns descriptors of system regions;
    CUDA regions have no descriptor."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Region, int | None, float]] = OrderedDict()

    def put(self, region: Region, fd: int | None, now: float) -> None:
        self._kept[region.number] = (region, fd, now + _KEEP_S)

    def get(self, number: int) -> tuple[Region | None, int | None]:
        """Return the region and its descriptor, still owned by `Tombstones`, or (None, None)."""
        region, fd, _ = self._kept.get(number, (None, None, 0.0))
        return region, fd

    def expire(self, now: float) -> None:
        """Drop tombstones that are too old, and the oldest beyond the limit."""
        while self._kept:
            number, (_, fd, until) = next(iter(self._kept.items()))
            if now < until and len(self._kept) <= _MAX_KEPT:
                break
            del self._kept[number]
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        self.expire(float("inf"))
