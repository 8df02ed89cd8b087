"""Clients' memory that outlives the service: systemd keeps the regions until the next start.

systemd's descriptor store holds the regions' descriptors under a few names. An object's inode
determines its name, and all descriptors of a name can be removed together, whichever supervisor
has stored them. A list of all regions has a name of its own. At a start the supervisor keeps the
restored regions for the coordinator, as if an earlier coordinator had just ended.
"""

import logging
import os
from collections.abc import Iterable, Mapping

import msgspec

from shmserve.core.registry import Region
from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.supervisor.generations.activation import REGIONS
from shmserve.transport.channel import MAX_FDS, close_all
from shmserve.transport.notify import Notifier

_log = logging.getLogger(__name__)

_LIST = f"{REGIONS}list"
_NAMES = 16  # of descriptors: if a region goes, the others of its name are stored again
_PATIENCE_S = 0.1  # for systemd to take a message; messages that are not taken are sent again
_MAX_BYTES = 64 << 20
_decode = msgpack_decoder(tuple[Region, ...])


class LastingRegions:
    """Regions as systemd has stored them; `turn` sends changes."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        limit = int(os.environ.get("FDSTORE") or 0)  # since systemd 254
        self._room = limit - 1 if limit else None  # beside the list; None: unknown
        # region numbers by name; a missing name: content unknown
        self._stored: dict[str, set[int]] = {}
        self._listed: Mapping[int, Region] | None = None

    def turn(self, regions: Mapping[int, Region], fds: Mapping[int, int]) -> None:
        """Store the regions with their descriptors. A new mapping `regions` is a change."""
        if regions is self._listed or not self._notifier.address:
            return
        named: dict[str, set[int]] = {f"{REGIONS}{n}": set() for n in range(_NAMES)}
        # systemd drops surplus descriptors and says nothing: send only as many as find room.
        for number in sorted(regions.keys() & fds.keys())[: self._room]:
            # systemd stores an object once, even if two regions share the object.
            named[f"{REGIONS}{regions[number].inode % _NAMES}"].add(number)
        # The list goes first: a full store drops the last ones, and all regions need the list.
        listed = os.memfd_create(_LIST, os.MFD_CLOEXEC)
        with os.fdopen(listed, "wb") as file:
            file.write(msgspec.msgpack.encode(tuple(regions.values())))
            file.flush()
            if not self._store(_LIST, [listed]):
                return
        # Names that give room go first, and a name not sent completely before all others.
        for name, numbers in sorted(named.items(), key=self._growth):
            # systemd compares each new descriptor with all that it has, so send no descriptor
            # again only because another region of the name has come.
            known, stored = name in self._stored, self._stored.pop(name, set())
            grows = known and stored <= numbers
            sent = [fds[number] for number in sorted(numbers - stored if grows else numbers)]
            if (sent or not grows) and not self._store(name, sent, replace=not grows):
                return
            self._stored[name] = numbers
        self._listed = regions

    def _growth(self, item: tuple[str, set[int]]) -> tuple[bool, int]:
        name, numbers = item
        return name in self._stored, len(numbers) - len(self._stored.get(name, ()))

    def _store(self, name: str, fds: list[int], replace: bool = True) -> bool:
        """Add descriptors to a name, or replace all of its descriptors. Return False if systemd did
        not take every message."""
        named = f"FDNAME={name}"
        taken = not replace or self._notifier.send("FDSTOREREMOVE=1", named, patience_s=_PATIENCE_S)
        for start in range(0, len(fds), MAX_FDS):
            part = fds[start : start + MAX_FDS]
            taken = taken and self._notifier.send(
                "FDSTORE=1", named, fds=part, patience_s=_PATIENCE_S
            )
        return taken


def restored(passed: Iterable[tuple[str, int]]) -> tuple[dict[int, Region], dict[int, int]]:
    """Return regions that systemd has kept, and descriptors, by number. Close other descriptors.
    Regions with a key need no descriptor: the coordinator opens them again."""
    unused: list[int] = []
    objects: dict[tuple[int, int], int] = {}
    regions: tuple[Region, ...] = ()
    for name, fd in passed:
        info = os.fstat(fd)
        if name == _LIST:
            regions = _listed(fd) or regions
        if name == _LIST or objects.setdefault((info.st_dev, info.st_ino), fd) != fd:
            unused.append(fd)
    if objects and not regions:
        _log.warning("the list of clients' memory was not kept: %d objects are lost", len(objects))
    regions_by_number: dict[int, Region] = {}
    fds: dict[int, int] = {}
    unclaimed = dict(objects)
    for region in regions:
        identity = (region.device, region.inode)
        if identity in objects:
            regions_by_number[region.number] = region
            fds[region.number] = (
                unclaimed.pop(identity) if identity in unclaimed else os.dup(objects[identity])
            )
        elif region.memory.has_key:
            regions_by_number[region.number] = region
    if lost := len(regions) - len(regions_by_number):
        _log.warning(
            "%d of %d regions that clients had registered are lost: the service manager kept fewer"
            " descriptors (FileDescriptorStoreMax=)",
            *(lost, len(regions)),
        )
    close_all([*unused, *unclaimed.values()])
    return regions_by_number, fds


def _listed(fd: int) -> tuple[Region, ...]:
    """Return the regions of a list, none if the list cannot be read."""
    try:
        regions: tuple[Region, ...] = _decode(os.pread(fd, _MAX_BYTES, 0))
    except (OSError, UnreadableMessage) as ex:
        _log.warning("a list of what clients had registered cannot be read: %s", ex)
        return ()
    return regions
