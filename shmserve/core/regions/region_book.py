"""Region book: registered regions, and the rules for registering, using, listing and removing
them.

Owner: the coordinator writes the book; frontends apply the same rules to the published copy. Pure:
the operating system's view of an object enters as `ObjectFacts`. All arithmetic is in exact
integers. Invariants (tests/property/test_regions_properties.py):
- a name belongs to a caller's namespace: no caller finds, blocks or removes another caller's
  region;
- system and CUDA regions share the namespace and the quotas;
- a number is never used twice;
- no region reaches beyond its object as registered, and no owner exceeds the quotas.

A registration is checked in this order: remote callers; key; name; the object can be opened (no
link is followed, nothing waits); the object is a regular file, none of the server's own by device
and inode, and the caller's own; bounds; name taken; quotas. The region is then published, and
acknowledged last. For CUDA regions see `coordinator.regions.cuda_regions`.

Each owner (uid) has a namespace of names. A look-up finds the caller's own regions only, and does
not reveal regions of other owners. `client_shm_isolation = "shared"` makes one namespace for all
owners, as Triton has.
"""

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
    """Return the caller in whose name regions are used. A remote holder of a key with the scope
    `register` acts as the server's own user."""
    return Caller(server_uid) if caller.remote and "register" in caller.scopes else caller


class ObjectFacts(Struct, frozen=True):
    """Kernel's view of an open object. `ours`: True if the object belongs to the server itself."""

    device: int
    inode: int
    size: int
    uid: int
    regular: bool = True
    ours: bool = False


def region_key(caller: Caller, name: str, settings: Settings, server_uid: int) -> str | None:
    """Return the key of a caller's name in the published regions, or None if the caller may have
    no regions."""
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
    """Return the regions that the caller may see, sorted by name. `kind`: family to return, empty
    for all."""
    prefix = region_key(caller, "", settings, server_uid)
    if prefix is None:
        return []
    inside = [region for key, region in regions.items() if key.startswith(prefix)]
    return sorted(
        (r for r in inside if kind in ("", r.memory.family)), key=lambda region: region.name
    )


class RegionBook:
    """All regions. `regions` is published."""

    def __init__(self, settings: Settings, server_uid: int) -> None:
        self._settings = settings
        self._server_uid = server_uid
        self.regions: dict[str, Region] = {}
        self.next_number = 1
        self._keys: dict[int, str] = {}  # region number -> key in `regions`
        self._strikes: set[int] = set()  # owners (uids) whose memory vanished under an executor

    def skip_to(self, number: int) -> None:
        """Give new regions no number below `number`."""
        self.next_number = max(self.next_number, number)

    def restore(self, regions: Mapping[str, Region], next_number: int) -> None:
        """Continue with the regions published by an earlier coordinator."""
        self.regions = dict(regions)
        self._keys = {region.number: key for key, region in regions.items()}
        self._strikes = {region.uid for region in regions.values() if region.copy}
        self.next_number = max([next_number, *(number + 1 for number in self._keys)])

    def adopt(self, region: Region) -> Region | None:
        """Take over a numbered region; return the region replaced under its name, or None."""
        place = self._place(region.uid, region.name)
        replaced = self.regions.get(place)
        if replaced is not None:
            self.drop([replaced.number])
        self.regions[place] = region
        self._keys[region.number] = place
        if region.copy:
            self._strikes.add(region.uid)
        return replaced

    def get(self, number: int) -> Region | None:
        key = self._keys.get(number)
        return self.regions[key] if key is not None else None

    def has(self, caller: Caller, name: str) -> bool:
        """Return True if a name of the caller is taken."""
        return region_key(caller, name, self._settings, self._server_uid) in self.regions

    def may_register(self, caller: Caller) -> None:
        """Check that the caller may register regions at all. Raise PermissionDenied if the caller
        is remote, and `client_shm_allow_remote` is off."""
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
        """Add a region.

        `again`: True if the request is repeated because its answer was lost; an identical
        registration is then no error. `kind`: a kind without a key means that the object came as a
        descriptor.

        Raise InvalidArgument, PermissionDenied, AlreadyExists or ResourceExhausted, checked in the
        order given in this module's docstring.
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
        """Check that a region may be entered; return it, complete except for its number (0). If
        `again`, return an identical region that is there already. Raise AlreadyExists if the name
        is taken, by a region of any kind. Raise InvalidArgument or ResourceExhausted if a quota is
        exceeded."""
        existing = self.regions.get(self._place(region.uid, region.name))
        if existing is not None:
            if again and replace(region, number=existing.number) == existing:
                return existing
            raise AlreadyExists(f"shared memory region '{region.name}' already in manager")
        self._check_quotas(region)
        return region

    def enter(self, candidate: Region, again: bool = False) -> Region:
        """Check a region as `admit` does, then number and keep the region."""
        region = self.admit(candidate, again)
        if not region.number:
            region = replace(region, number=self.next_number)
            self.next_number += 1
            place = self._keys[region.number] = self._place(region.uid, region.name)
            self.regions[place] = region
        return region

    def _place(self, uid: int, name: str) -> str:
        place = region_key(Caller(uid), name, self._settings, self._server_uid)
        assert place is not None  # may_register has refused callers without a namespace
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
        """Remove one of the caller's regions of a family, or all if `name` is empty. Return the
        removed regions; an unknown name removes none."""
        if not name:
            removed = visible(self.regions, caller, self._settings, self._server_uid, kind)
            return self.drop(region.number for region in removed)
        place = region_key(caller, name, self._settings, self._server_uid)
        region = self.regions.get(place) if place is not None else None
        return (
            self.drop([region.number])
            if region is not None and region.memory.family == kind
            else []
        )

    def drop(self, numbers: Iterable[int]) -> list[Region]:
        """Remove regions by number; return the removed regions."""
        removed = []
        for number in numbers:
            key = self._keys.pop(number, None)
            if key is not None:
                removed.append(self.regions.pop(key))
        return removed

    def of_process(self, pid: int, started: int) -> list[Region]:
        return [r for r in self.regions.values() if r.pid == pid and r.started == started]

    def quarantine(self, number: int, reason: str) -> Region | None:
        """Take a region out of use. Return the changed region, or None if nothing changed."""
        region = self.get(number)
        if region is None or region.quarantined:
            return None
        region = self.regions[self._keys[number]] = replace(region, quarantined=reason)
        return region

    def strike(self, uid: int) -> list[int]:
        """Note that an executor died of this owner's memory: from now on the owner's truncatable
        regions are copied, never mapped. Return the numbers of changed regions, which may be
        mapped already."""
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
    """Return a region to use, after checking that the window lies inside. Raise NotFound if the
    caller has no such region. Raise InvalidArgument if the window reaches outside, or the region is
    in quarantine."""
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
