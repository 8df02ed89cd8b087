"""The link to the coordinator of the generation before, which has clients as long as it drains."""

from __future__ import annotations

import queue
from collections.abc import Callable

from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.region_messages import RegionsTaken, SharedRegions
from shmserve.transport import rundir
from shmserve.transport.channel import close_all
from shmserve.transport.link import Link, LinkHandlers

_ROLE = "successor"


class Predecessor:
    """Until its generation has ended. `wake`: the coordinator's thread, for what has come."""

    def __init__(
        self, run_dir: str, process: str, regions: RegionRegistrations, wake: Callable[[], None]
    ) -> None:
        self._run_dir = run_dir
        self._regions = regions
        self._wake = wake
        self._inbox: queue.SimpleQueue[tuple[FromCoordinator, list[int]]] = queue.SimpleQueue()
        self._link: Link | None = Link(
            run_dir,
            _ROLE,
            process,
            LinkHandlers(
                on_trim=lambda nbytes: None,
                on_stats=lambda what: {},
                held_bytes=lambda: 0,
                on_message=lambda message: self._came(message, []),
                on_fds=self._came,
            ),
        )
        regions.sharing.begin(self._link.send, False)
        self._link.start()

    def turn(self, now: float) -> None:
        """Take what has come; on the coordinator's thread."""
        while not self._inbox.empty():
            message, fds = self._inbox.get()
            if isinstance(message, SharedRegions):
                self._regions.take(message, fds, now)
                continue
            close_all(fds)
            if isinstance(message, RegionsTaken):
                self._regions.sharing.confirmed(message)
        if self._link is not None and rundir.lock(self._run_dir, "master").holder() is None:
            self.close()

    def close(self) -> None:
        """Nobody is told anything any more."""
        if self._link is not None:
            self._regions.sharing.end()
            self._link.close()
            self._link = None
        while not self._inbox.empty():
            close_all(self._inbox.get()[1])

    def _came(self, message: FromCoordinator, fds: list[int]) -> None:
        self._inbox.put((message, fds))
        self._wake()
