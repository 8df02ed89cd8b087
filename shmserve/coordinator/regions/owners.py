"""Owners: processes that registered regions, watched by pidfd where the process is known."""

import os
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.registry import Region
from shmserve.transport.processes import pidfd_open
from shmserve.transport.trust.process_identity import is_of

Process = tuple[int, int]  # pid and start time, because pids are reused


class Owners(Struct):
    """Regions per process. `watch` and `unwatch` are called once for each pidfd."""

    _watch: Callable[[int, Process], object]
    _unwatch: Callable[[int], object]
    _enabled: bool
    _watched: dict[Process, tuple[int, set[int]]] = {}

    def add(self, region: Region) -> bool:
        """Watch the region's process, if known. Return False if the process has already ended."""
        if not self._enabled or not region.pid:
            return True
        process = (region.pid, region.started)
        watched = self._watched.get(process)
        if watched is None:
            pidfd = pidfd_open(region.pid)
            if pidfd is None:
                return False
            if not is_of(pidfd, region.pid, region.started):  # another process has the pid now
                os.close(pidfd)
                return False
            watched = self._watched[process] = (pidfd, set())
            self._watch(pidfd, process)
        watched[1].add(region.number)
        return True

    def remove(self, region: Region) -> None:
        """Remove a region. After a process's last region, the process is no longer watched."""
        process = (region.pid, region.started)
        watched = self._watched.get(process)
        if watched is None:
            return
        watched[1].discard(region.number)
        if not watched[1]:
            del self._watched[process]
            self._unwatch(watched[0])
            os.close(watched[0])

    def close(self) -> None:
        for pidfd, _ in self._watched.values():
            os.close(pidfd)
        self._watched.clear()
