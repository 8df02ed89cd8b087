"""The book of registered regions: who may register, use, see and remove what.

Owner: the coordinator writes it; frontends apply the same rules to the published copy.
Pure: what the operating system knows of an object comes in as `ObjectFacts`. All arithmetic
is in exact integers. Invariants (tests/property/test_regions_properties.py):
- a name is one caller's namespace's: nobody finds, blocks or removes another's region;
- system and CUDA regions share that namespace, and the quotas;
- a number is never used twice;
- no region reaches outside of its object as it was registered, nor an owner beyond its quotas.

A registration is checked in this order: remote callers; key; name; the object can be opened (no
link is followed, nothing waits); it is a regular file, none of the server's own by device and
inode, and the caller's own; bounds; name taken; quotas. The region is then published, and
acknowledged last. For CUDA regions see `coordinator.regions.cuda_regions`.

Each owner (uid) has a namespace of names. A look-up finds the caller's own regions only: another
owner's region is exactly like none. `client_shm_isolation = "shared"` makes it one namespace for
all, as Triton has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.caller import REMOTE_UID, Caller
from shmserve.core.region_kinds import BY_KEY, SYSTEM, RegionKind
from shmserve.core.regions.region_names import check_name, object_name
from shmserve.core.registry import Region
from shmserve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)

_MAX_SIZE = (1 << 63) - 1
MAX_REGION_BYTES = 1 << 40
_MAX_UINT64 = (1 << 64) - 1


def acting(caller: Caller, server_uid: int) -> Caller:
    """As whom somebody has regions: the holder of a key with the scope `register`, from elsewhere,
    as the server's own user."""
    return Caller(server_uid) if caller.remote and "register" in caller.scopes else caller


class ObjectFacts(Struct, frozen=True):
    """What the kernel says of an open object. `ours`: it belongs to the server itself."""

    device: int
    inode: int
    size: int
    uid: int
    regular: bool = True
    ours: bool = False


def region_key(caller: Caller, name: str, settings: Settings, server_uid: int) -> str | None:
    """Where the published regions have this name of this caller; None: it has none at all."""
    uid = caller.uid
    if uid == REMOTE_UID:
        if not settings.client_shm_allow_remote:
            return None
        uid = server_uid
    return f"/{name}" if settings.client_shm_isolation == "shared" else f"{uid}/{name}"


def visible(
    regions: Mapping[str, Region],
    caller: Caller,
    settings: Settings,
    server_uid: int,
    kind: str = "",
) -> list[Region]:
    """The regions the caller may see, by name; of one family, or of all."""
    prefix = region_key(caller, "", settings, server_uid)
    if prefix is None:
        return []
    inside = [region for key, region in regions.items() if key.startswith(prefix)]
    return sorted(
        (r for r in inside if kind in ("", r.memory.family)), key=lambda region: region.name
    )


class RegionBook:
    """All regions. `regions` is what is published."""

    def __init__(self, settings: Settings, server_uid: int) -> None:
        self._settings = settings
        self._server_uid = server_uid
        self.regions: dict[str, Region] = {}
        self.next_number = 1
        self._keys: dict[int, str] = {}  # by number
        self._strikes: set[int] = set()  # uids whose memory vanished under an executor

    def skip_to(self, number: int) -> None:
        """Give new regions no number below this one."""
        self.next_number = max(self.next_number, number)

    def restore(self, regions: Mapping[str, Region], next_number: int) -> None:
        """Continue what an earlier coordinator published."""
        self.regions = dict(regions)
        self._keys = {region.number: key for key, region in regions.items()}
        self._strikes = {region.uid for region in regions.values() if region.copy}
        self.next_number = max([next_number, *(number + 1 for number in self._keys)])

    def adopt(self, region: Region) -> Region | None:
        """Take over one that is numbered; returns what had its name before."""
        place = self._place(region.uid, region.name)
        before = self.regions.get(place)
        if before is not None:
            self.drop([before.number])
        self.regions[place] = region
        self._keys[region.number] = place
        if region.copy:
            self._strikes.add(region.uid)
        return before

    def get(self, number: int) -> Region | None:
        key = self._keys.get(number)
        return self.regions[key] if key is not None else None

    def may_register(self, caller: Caller) -> None:
        """Refuse those who may register nothing.

        Raises:
            PermissionDenied: a remote caller.
        """
        if caller.remote and not self._settings.client_shm_allow_remote:
            raise PermissionDenied(
                "shared memory can be registered only over a Unix socket or from this machine's"
                " loopback interface (setting client_shm_allow_remote)"
            )

    def register(
        self,
        caller: Caller,
        name: str,
        key: str,
        offset: int,
        byte_size: int,
        facts: ObjectFacts,
        again: bool = False,
        kind: RegionKind = BY_KEY,
    ) -> Region:
        """Add a region. `again`: the question was asked before and its answer lost, so that
        finding the very same registration is no error. `kind`: if it has no key, the object
        came as a descriptor.

        Raises:
            InvalidArgument, PermissionDenied, AlreadyExists, ResourceExhausted: as checked in
                the order of this file's head.
        """
        self.may_register(caller)
        if kind.has_key:
            object_name(key, name)
        check_name(name)
        self._check_object(caller, name, facts)
        if not (offset >= 0 and byte_size > 0 and offset + byte_size <= min(facts.size, _MAX_SIZE)):
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: offset {offset}"
                f" and byte_size {byte_size} must lie within the object's {facts.size} bytes"
            )
        region = Region(
            name, 0, key, offset, byte_size, caller.uid, caller.pid,
            caller.started, facts.device, facts.inode, facts.size,
            kind=kind.kind, copy=caller.uid in self._strikes and not kind.keeps_size,
            sealed=kind.keeps_size,
        )  # fmt: skip
        return self.enter(region, again)

    def admit(self, region: Region, again: bool = False) -> Region:
        """A region that is complete but for its number (0), if it may be entered; or the very
        same one, which is there already, if the question was asked `again`.

        Raises:
            AlreadyExists: its name is taken, by a region of whatever kind.
            InvalidArgument, ResourceExhausted: a quota.
        """
        there = self.regions.get(self._place(region.uid, region.name))
        if there is not None:
            if again and replace(region, number=there.number) == there:
                return there
            raise AlreadyExists(f"shared memory region '{region.name}' already in manager")
        self._check_quotas(region)
        return region

    def enter(self, candidate: Region, again: bool = False) -> Region:
        """Number and keep a region; as `admit`."""
        region = self.admit(candidate, again)
        if not region.number:
            region = replace(region, number=self.next_number)
            self.next_number += 1
            place = self._keys[region.number] = self._place(region.uid, region.name)
            self.regions[place] = region
        return region

    def _place(self, uid: int, name: str) -> str:
        place = region_key(Caller(uid), name, self._settings, self._server_uid)
        assert place is not None  # may_register has refused those without a namespace
        return place

    def _check_object(self, caller: Caller, name: str, facts: ObjectFacts) -> None:
        if not facts.regular:
            raise InvalidArgument(f"shared memory region '{name}': the key names no memory object")
        acting = self._server_uid if caller.remote else caller.uid
        trusted = acting == 0 or acting in self._settings.client_shm_allowed_uids
        if facts.ours or not (trusted or facts.uid == acting):
            text = f"shared memory region '{name}': the caller does not own the object"
            raise PermissionDenied(text)

    def _check_quotas(self, candidate: Region) -> None:
        settings, byte_size = self._settings, candidate.byte_size
        if byte_size > MAX_REGION_BYTES:
            raise InvalidArgument(
                f"a shared memory region may have {MAX_REGION_BYTES} bytes, not {byte_size}"
            )
        own = [region.byte_size for region in self.regions.values() if region.uid == candidate.uid]
        if len(own) >= settings.client_shm_max_regions:
            raise ResourceExhausted(
                f"too many shared memory regions: {len(own)} (setting client_shm_max_regions)"
            )
        if sum(own) + byte_size > settings.client_shm_max_total_bytes:
            raise ResourceExhausted(
                "too many bytes in shared memory regions (setting client_shm_max_total_bytes)"
            )

    def unregister(self, caller: Caller, name: str, kind: str = SYSTEM) -> list[Region]:
        """Remove one of the caller's regions of a kind, or all of them (no name); unknown ones
        are none."""
        if not name:
            gone = visible(self.regions, caller, self._settings, self._server_uid, kind)
            return self.drop(region.number for region in gone)
        place = region_key(caller, name, self._settings, self._server_uid)
        region = self.regions.get(place) if place is not None else None
        return (
            self.drop([region.number])
            if region is not None and region.memory.family == kind
            else []
        )

    def drop(self, numbers: Iterable[int]) -> list[Region]:
        """Remove regions by number; returns those that were there."""
        gone = []
        for number in numbers:
            key = self._keys.pop(number, None)
            if key is not None:
                gone.append(self.regions.pop(key))
        return gone

    def of_process(self, pid: int, started: int) -> list[Region]:
        return [r for r in self.regions.values() if r.pid == pid and r.started == started]

    def quarantine(self, number: int, reason: str) -> Region | None:
        """Take a region out of use. None: nothing to do."""
        region = self.get(number)
        if region is None or region.quarantined:
            return None
        region = self.regions[self._keys[number]] = replace(region, quarantined=reason)
        return region

    def strike(self, uid: int) -> list[int]:
        """An executor died of a region of this owner's: from now on none of its regions is mapped
        that can be pulled away. Returns the numbers of those that may be mapped already."""
        self._strikes.add(uid)
        changed = [
            (key, region)
            for key, region in self.regions.items()
            if region.uid == uid and not (region.memory.keeps_size or region.copy)
        ]
        for key, region in changed:
            self.regions[key] = replace(region, copy=True)
        return [region.number for _, region in changed]


def find(
    regions: Mapping[str, Region],
    caller: Caller,
    name: str,
    offset: int,
    nbytes: int,
    settings: Settings,
    server_uid: int,
) -> Region:
    """A region for use, with a window that lies inside of it.

    Raises:
        NotFound: the caller has no such region.
        InvalidArgument: the window reaches outside, or the region is in quarantine.
    """
    key = region_key(caller, name, settings, server_uid)
    region = regions.get(key) if key is not None else None
    if region is None:
        raise NotFound(f"Unable to find shared memory region: '{name}'")
    if region.quarantined:
        raise InvalidArgument(f"shared memory region '{name}' is out of use: {region.quarantined}")
    if offset < 0 or offset >= region.byte_size:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{name}'")
    if offset + nbytes > _MAX_UINT64:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum"
            f" value ({_MAX_UINT64}) for region '{name}'"
        )
    if nbytes < 0 or offset + nbytes > region.byte_size:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{name}'")
    return region
