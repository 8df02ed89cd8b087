"""Regions that are no more, kept a little for requests that were accepted before."""

from __future__ import annotations

import os
from collections import OrderedDict

from shmserve.core.registry import Region

_KEEP_S = 10.0
_MOST = 256


class Tombstones:
    """By number, oldest first. Owns the descriptors of system regions; CUDA regions have none."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Region, int | None, float]] = OrderedDict()

    def put(self, region: Region, fd: int | None, now: float) -> None:
        self._kept[region.number] = (region, fd, now + _KEEP_S)

    def get(self, number: int) -> tuple[Region | None, int | None]:
        """The region and its descriptor, which stays here."""
        region, fd, _ = self._kept.get(number, (None, None, 0.0))
        return region, fd

    def expire(self, now: float) -> None:
        """Let go of what has been here long enough, or is too much."""
        while self._kept:
            number, (_, fd, until) = next(iter(self._kept.items()))
            if now < until and len(self._kept) <= _MOST:
                break
            del self._kept[number]
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        self.expire(float("inf"))
