"""Predecessor: link to the coordinator of the previous generation, which has clients while it
drains."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.protocol.control.link_messages import Welcome
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.region_messages import RegionsTaken, SharedRegions
from shmserve.transport import rundir
from shmserve.transport.channel import close_all
from shmserve.transport.link import Link, LinkHandlers
from shmserve.transport.processes import has_ended

_ROLE = "successor"


class Predecessor:
    """Link to the previous generation's coordinator, until that generation has ended. `wake`:
    wakes the coordinator's thread for received messages."""

    def __init__(
        self, run_dir: str, process: str, regions: RegionRegistrations, wake: Callable[[], None]
    ) -> None:
        # Keep a pidfd: once the master has ended, its lock may belong to the next master.
        holder = rundir.lock(run_dir, "master").holder_pidfd()
        self._master_fd = holder[1] if holder is not None else -1
        self._regions = regions
        self._wake = wake
        self._inbox: queue.SimpleQueue[tuple[FromCoordinator, list[int]]] = queue.SimpleQueue()
        self._link: Link | None = Link(
            run_dir,
            _ROLE,
            process,
            LinkHandlers(on_message=lambda message: self._came(message, []), on_fds=self._came),
        )
        self._link.start()

    def turn(self, now: float) -> None:
        """Handle received messages, on the coordinator's thread. Close the link once the master
        has ended."""
        while not self._inbox.empty():
            message, fds = self._inbox.get()
            if isinstance(message, SharedRegions):
                self._regions.take(message, fds, now)
                continue
            close_all(fds)
            if isinstance(message, RegionsTaken):
                self._regions.sharing.confirmed(message)
            elif isinstance(message, Welcome) and self._link is not None:
                # Either coordinator may have been restarted, so send all regions again. At the
                # very first connection the predecessor chooses the region numbers.
                self._regions.sharing.begin(self._link.send, bool(self._regions.book.regions))
        if self._link is not None and (self._master_fd < 0 or has_ended(self._master_fd)):
            self.close()

    def close(self) -> None:
        """End sharing, and close the link."""
        if self._link is not None:
            self._regions.sharing.end()
            self._link.close()
            self._link = None
            if self._master_fd >= 0:
                os.close(self._master_fd)
        while not self._inbox.empty():
            close_all(self._inbox.get()[1])

    def _came(self, message: FromCoordinator, fds: list[int]) -> None:
        self._inbox.put((message, fds))
        self._wake()
