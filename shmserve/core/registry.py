"""Registry: the published state that every frontend knows without asking.

Only the coordinator writes the registry (I10). A `Snapshot` is immutable; every change makes a new
snapshot with a higher `generation`. `shmserve.shm.registry_page` publishes snapshots.
"""

from enum import StrEnum
from functools import cached_property

from msgspec import Struct

from shmserve.core.live_settings import RuntimeSettings, TraceSettings
from shmserve.core.region_kinds import SYSTEM, RegionKind, kind_of
from shmserve.errors import NotFound, Unavailable
from shmserve.tensor.spec import ModelSpec


class ModelState(StrEnum):
    """States of a model version, as named by the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class LiveInstance(Struct, frozen=True):
    """Instance that takes requests. `process` changes with every restart of the executor; `device`
    is the model's compute device, such as ``cpu`` or ``cuda:0``."""

    name: str
    process: str
    endpoint: str
    pid: int
    device: str = "cpu"


class ModelEntry(Struct, frozen=True):
    """Published version of a model. Only instances in `instances` take requests now.

    READY with no instances: the executors are being restarted; requests get a clear 503. `trace`:
    settings for traced requests; None: no request is traced.
    """

    spec: ModelSpec
    state: ModelState
    instances: tuple[LiveInstance, ...] = ()
    reason: str = ""
    trace: TraceSettings | None = None
    required: bool = True  # False: not needed for the server to be ready


ALL, ANY = ("all",), ("any",)  # values of the setting `ready_requires`
FRONTENDS = {"grpc": "gRPC process", "http": "HTTP worker"}  # by role
_NAMED = 8  # models named in a message


class Region(Struct, frozen=True):
    """Client memory registered under a name: `byte_size` bytes from `offset` of an object or of a
    CUDA IPC allocation.

    Attributes:
        number: id of the region in messages between processes; never used again within an epoch.
        uid: user that registered the region (-1: a remote caller); `pid` and `started` (process
            start in clock ticks since boot, or see `transport.trust.process_identity`) name the
            process, 0: unknown.
        device, inode, object_bytes: identity and size of the object at registration.
        copy: accessed by copying only, never mapped, because the owner has truncated memory
            before.
        sealed: no process can shrink the object, so mapping is safe for all processes.
        device_id, handle: for CUDA regions, the device as the client numbers devices, and the
            cudaIpcMemHandle_t (64 bytes). The handle opens the memory for any process, so it is
            never shown.
        quarantined: reason why the region cannot be used any more; empty: usable.
    """

    name: str
    number: int
    key: str
    offset: int
    byte_size: int
    uid: int
    pid: int = 0
    started: int = 0
    device: int = 0
    inode: int = 0
    object_bytes: int = 0
    kind: str = SYSTEM
    copy: bool = False
    quarantined: str = ""
    sealed: bool = False
    device_id: int = 0
    handle: bytes = b""

    def __repr__(self) -> str:
        return f"Region({self.number}, {self.name!r}, {self.kind}, {self.byte_size} bytes)"

    @property
    def memory(self) -> RegionKind:
        return kind_of(self.kind, self.sealed)

    @property
    def on_device(self) -> str:
        """Device name, such as ``cuda:0``; empty: the host's memory."""
        device = self.memory.device
        return f"{device}:{self.device_id}" if device else ""

    @property
    def end(self) -> int:
        """End of the region in the object: the smallest size that the object must keep."""
        return self.offset + self.byte_size


class Snapshot(Struct, frozen=True, dict=True):
    """State of the registry at one generation.

    Attributes:
        models: name -> version -> entry.
        failed: models or model/versions that could not be described at start, with reasons. They
            keep the server from being ready.
        refused: as `failed`, for later load requests. Does not affect readiness.
        draining: True if the service is about to stop.
        regions: regions by `core.regions.region_book.region_key`.
        next_region: number of the next region.
        tuning: settings changed by clients; None: not published yet.
        flags: extension flags that clients may change, by setting name.
        shortage: lack of memory which keeps the server from being ready; empty: none.
        unserved: frontend kind (`FRONTENDS`) without a serving process -> reason, for operators
            alone.
        requires: the setting `ready_requires`: names of models, or `ALL` or `ANY`.
        notices: model ("": all models) -> notice for clients about a model that may be served
            anyway.
    """

    epoch: str
    generation: int
    models: dict[str, dict[str, ModelEntry]] = {}
    # every repository folder has been read, with the result in this snapshot
    complete: bool = False
    failed: dict[str, str] = {}
    draining: bool = False
    regions: dict[str, Region] = {}
    next_region: int = 1
    tuning: RuntimeSettings | None = None
    refused: dict[str, str] = {}
    flags: dict[str, bool] = {}
    shortage: str = ""
    requires: tuple[str, ...] = ALL
    notices: dict[str, str] = {}
    unserved: dict[str, str] = {}

    @cached_property
    def ready_entries(self) -> dict[tuple[str, str], ModelEntry]:
        """READY entries by (name, version); with version "", the newest READY version."""
        entries = {
            (name, version): entry
            for name, versions in self.models.items()
            for version, entry in versions.items()
        }
        entries |= {(name, ""): entry for name in self.models if (entry := self.newest(name))}
        return {key: entry for key, entry in entries.items() if entry.state is ModelState.READY}

    def newest(self, name: str) -> ModelEntry | None:
        """Return the newest READY version, else the newest of any state, else None."""
        versions = self.models.get(name)
        if not versions:
            return None
        ordered = sorted(versions.values(), key=lambda entry: int(entry.spec.version), reverse=True)
        return next((e for e in ordered if e.state is ModelState.READY), ordered[0])

    def model(self, name: str, version: str = "") -> ModelEntry:
        """Return the entry of a model, in any state. Without a version, return the newest READY
        version, else the newest. Raise NotFound for an unknown model or version. Raise Unavailable
        while the repository has not been read yet."""
        entry = self.models.get(name, {}).get(version) if version else self.newest(name)
        if entry is None:
            which = f" version {version}" if version and self.models.get(name) else ""
            self.require_complete(f"model '{name}'{which}")
            raise NotFound(
                f"Request for unknown model: '{name}'{which} is not found; the repository index"
                " lists what there is"
            )
        return entry

    def require_complete(self, what: str) -> None:
        """Raise Unavailable if the repository has not been read yet: then nobody can say that
        `what`, such as ``model 'm'``, does not exist."""
        if not self.complete:
            raise Unavailable(
                f"{what} is not known yet, because the service is not ready: {self._hindrance}"
            )

    def latest(self, entry: ModelEntry) -> ModelEntry:
        """Return this snapshot's entry of the same version if the entry has instances and takes
        the same requests, else `entry`."""
        current = self.models.get(entry.spec.name, {}).get(entry.spec.version)
        if current is entry or current is None or not current.instances:
            return entry
        return current if current.spec.takes_the_same(entry.spec) else entry

    def refreshed(self, entry: ModelEntry) -> ModelEntry:
        """Return this snapshot's entry of the same version. Raise NotFound or Unavailable if the
        version is not served any more, or takes other requests than `entry`."""
        spec = entry.spec
        current = require_ready(self.model(spec.name, spec.version), spec.version)
        if not current.spec.takes_the_same(spec):
            raise Unavailable(
                f"model '{spec.name}' has been replaced by one with other inputs or outputs"
            )
        return current

    @property
    def ready(self) -> bool:
        """True if every required model is loaded and has an executor.

        With `requires` `ALL`, a model loaded by a later request is required only once it serves.
        """
        return not (self._hindrance or self._missing)

    @property
    def why_not_ready(self) -> str:
        """Missing conditions of readiness, in words for clients; empty: none."""
        if self._hindrance:
            return self._hindrance
        names = self._missing
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{', '.join(names[:_NAMED])}{more}"

    @cached_property
    def _hindrance(self) -> str:
        """Reason not to be ready that does not depend on loaded models; empty: none."""
        if self.draining:
            return "it is about to stop"
        if self.shortage:
            return self.shortage
        if self.unserved:
            return " and ".join(f"no {FRONTENDS[kind]} serves" for kind in sorted(self.unserved))
        if self.complete:
            return ""
        reason = self.notices.get("", "")
        return f"it has not read its repository yet{f' ({reason})' if reason else ''}"

    @cached_property
    def _missing(self) -> list[str]:
        """Required models that cannot be used, each with the reason."""
        if self.requires == ANY:
            served = any(entry.instances for entry in self.ready_entries.values())
            return [] if served else ["no model is ready"]
        if self.requires != ALL:
            return [reason for name in self.requires if (reason := self._lacks(name))]
        failed = [f"'{key}' cannot be served" for key in self.failed]
        return failed + [
            f"'{name}' version {version} {_lack(entry)}"
            for name, versions in self.models.items()
            for version, entry in versions.items()
            if (entry.required or entry.state is ModelState.READY) and _lack(entry)
        ]

    def _lacks(self, name: str) -> str:
        """Return why a model named by the setting cannot be used; empty: usable."""
        entry = self.newest(name)
        reason = "is not loaded" if entry is None else _lack(entry)
        return f"'{name}' {reason}" if reason else ""


def _lack(entry: ModelEntry) -> str:
    """Return why a version cannot be used; empty: usable."""
    if entry.state is ModelState.READY:
        return "" if entry.instances else "has no instance"
    return f"is {entry.state.lower()}"


def require_ready(entry: ModelEntry, version: str) -> ModelEntry:
    """Return the entry unchanged if it can serve. `version`: the requested version, empty if none.
    Raise NotFound if no version was requested, and no version of the model can be used. Raise
    Unavailable if the version is not ready (now)."""
    if entry.state is not ModelState.READY:
        name = entry.spec.name
        if not version and entry.state is not ModelState.LOADING:
            reason = f": {entry.reason}" if entry.reason and entry.spec.steps else ""
            raise NotFound(f"Request for unknown model: '{name}' has no available versions{reason}")
        raise Unavailable(
            f"Request for unknown model: '{name}' version {entry.spec.version} "
            "is not at ready state"
        )
    return entry
