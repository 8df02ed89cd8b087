"""Clients' memory outlives the service: systemd keeps it until the next start.

Each region's descriptor is in systemd's descriptor store under a name of its own, and a list of all
regions in another. What comes back at a start is what the supervisor keeps for the coordinator,
as if the one before had just ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

import msgspec

from shmserve.core.registry import Region
from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.supervisor.activation import REGIONS
from shmserve.transport.channel import close_all
from shmserve.transport.notify import Notifier

_log = logging.getLogger(__name__)

_LIST = f"{REGIONS}list"
_MAX_BYTES = 64 << 20
_decode = msgpack_decoder(tuple[Region, ...])


class LastingRegions:
    """What systemd has; `turn` tells it of changes."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._stored: dict[int, Region] = {}

    def turn(self, regions: Mapping[int, Region], fds: Mapping[int, int]) -> None:
        """These are there now, with their descriptors."""
        if self._stored.keys() == regions.keys() or not self._notifier.address:
            return
        for number in self._stored.keys() - regions.keys():
            self._remove(f"{REGIONS}{number}")
        for number in regions.keys() - self._stored.keys():
            if number in fds:
                self._store(f"{REGIONS}{number}", fds[number])
        self._stored = dict(regions)
        listed = os.memfd_create(_LIST, os.MFD_CLOEXEC)
        with os.fdopen(listed, "wb") as file:
            file.write(msgspec.msgpack.encode(tuple(regions.values())))
            file.flush()
            self._store(_LIST, listed)

    def _store(self, name: str, fd: int) -> None:
        """In place of what has this name: an earlier generation's, perhaps."""
        self._remove(name)
        self._notifier.send("FDSTORE=1", f"FDNAME={name}", fds=[fd])

    def _remove(self, name: str) -> None:
        self._notifier.send("FDSTOREREMOVE=1", f"FDNAME={name}")


def restored(passed: Iterable[tuple[str, int]]) -> tuple[dict[int, Region], dict[int, int]]:
    """Regions that systemd has kept, and their descriptors: by number; others are closed."""
    by_name: dict[str, int] = {}
    unused = []
    for name, fd in passed:
        unused += [by_name[name]] if name in by_name else []
        by_name[name] = fd
    listed = by_name.pop(_LIST, -1)
    found: dict[int, Region] = {}
    if listed >= 0:
        unused.append(listed)
        try:
            found = {r.number: r for r in _decode(os.pread(listed, _MAX_BYTES, 0))}
        except (OSError, UnreadableMessage) as ex:
            _log.warning("what clients had registered is not known any more: %s", ex)
    fds = {n: fd for n in found if (fd := by_name.pop(f"{REGIONS}{n}", -1)) >= 0}
    close_all([*unused, *by_name.values()])
    return {number: found[number] for number in fds}, fds
