"""Processes that registered regions, watched by pidfd where they are known."""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.registry import Region
from shmserve.transport.processes import pidfd_open
from shmserve.transport.trust.process_identity import is_of

Process = tuple[int, int]  # pid and start: pids alone are used again


class Owners(Struct):
    """Counts regions per process. `watch` and `unwatch` are told of each pidfd once."""

    _watch: Callable[[int, Process], object]
    _unwatch: Callable[[int], object]
    _enabled: bool
    _known: dict[Process, tuple[int, set[int]]] = {}

    def add(self, region: Region) -> bool:
        """Watch its process, if there is one to watch; False: that has ended already."""
        if not self._enabled or not region.pid:
            return True
        process = (region.pid, region.started)
        known = self._known.get(process)
        if known is None:
            pidfd = pidfd_open(region.pid)
            if pidfd is None:
                return False
            if not is_of(pidfd, region.pid, region.started):  # another one has its number now
                os.close(pidfd)
                return False
            known = self._known[process] = (pidfd, set())
            self._watch(pidfd, process)
        known[1].add(region.number)
        return True

    def remove(self, region: Region) -> None:
        """A region is gone; with its last one a process is no longer watched."""
        process = (region.pid, region.started)
        known = self._known.get(process)
        if known is None:
            return
        known[1].discard(region.number)
        if not known[1]:
            del self._known[process]
            self._unwatch(known[0])
            os.close(known[0])

    def close(self) -> None:
        for pidfd, _ in self._known.values():
            os.close(pidfd)
        self._known.clear()
