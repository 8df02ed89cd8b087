"""The registry's published form: what every frontend knows without asking.

The coordinator alone writes it (I10). A `Snapshot` is immutable; every change makes
a new one with a higher `generation`. How it is published: `shmserve.shm.registry_page`.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

from msgspec import Struct

from shmserve.core.live_settings import RuntimeSettings, TraceSettings
from shmserve.core.region_kinds import SYSTEM, RegionKind, kind_of
from shmserve.errors import NotFound, Unavailable
from shmserve.tensor.spec import ModelSpec


class ModelState(StrEnum):
    """States of a model version, as the repository index names them."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class LiveInstance(Struct, frozen=True):
    """An instance that takes requests. `process` changes with every life of its executor,
    `device` is where its model computes: ``cpu`` or ``cuda:0``."""

    name: str
    process: str
    endpoint: str
    pid: int
    device: str = "cpu"


class ModelEntry(Struct, frozen=True):
    """One version of a model. Only instances in `instances` take requests now.

    READY with no instances: its executors are being restarted; requests get a clear 503.
    `trace`: what is traced of its requests; None: nothing.
    """

    spec: ModelSpec
    state: ModelState
    instances: tuple[LiveInstance, ...] = ()
    reason: str = ""
    trace: TraceSettings | None = None
    required: bool = True  # the server is not ready before it is READY


ALL, ANY = ("all",), ("any",)  # what a server that is ready may require
FRONTENDS = {"grpc": "gRPC process", "http": "HTTP worker"}  # by role
_NAMED = 8  # models, in words why it is not


class Region(Struct, frozen=True):
    """Client memory registered under a name: `byte_size` bytes from `offset` of an object, or
    of what a CUDA IPC handle stands for.

    Attributes:
        number: what processes call it; never used again within an epoch.
        uid: who registered it (-1: a remote caller); `pid` and `started` (its start in clock
            ticks since boot, or see `transport.trust.process_identity`) name the process, 0: not
            known.
        device, inode, object_bytes: the object as it was when it was registered.
        copy: reached by copying only, never mapped (its owner has pulled memory away before).
        sealed: nobody can make its object smaller, so mapping it is safe for everybody.
        device_id, handle: of CUDA regions: the device as the client numbers them, and the
            cudaIpcMemHandle_t (64 bytes), with which anybody can open the memory: never shown.
        quarantined: why it cannot be used any more; empty: it can.
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
        """``cuda:0`` or the like; empty: the host's memory."""
        device = self.memory.device
        return f"{device}:{self.device_id}" if device else ""

    @property
    def end(self) -> int:
        """Where it ends in its object: the size that the object must keep."""
        return self.offset + self.byte_size


class Snapshot(Struct, frozen=True, dict=True):
    """All of it at one generation.

    `models`: name -> version -> entry. `failed` and `refused`: what could not even be
    described (model, or model/version) and why, at start and by a later request to load it;
    only the former keeps the server from being ready. `draining`: the service is about to
    stop. `regions`: by `core.regions.region_book.region_key`; `next_region`: the number the next
    one gets.
    `tuning`: what clients have set; None: nobody has said yet.
    `flags`: what clients may change of extensions, by the names of their settings.
    `shortage`: why there is too little memory to be ready, whatever is loaded; empty: there is not.
    `unserved`: frontends of which no process serves (`FRONTENDS`), and why, for operators alone.
    `requires`: the setting `ready_requires`: names of models, or what stands for them.
    `notices`: model -> what is to be told of it although it may serve; "": of all of them.
    """

    epoch: str
    generation: int
    models: dict[str, dict[str, ModelEntry]] = {}
    complete: bool = False  # every repository folder has been looked at and told below
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
        """What can be used, by name and version; without a version the newest of a name."""
        entries = {
            (name, version): entry
            for name, versions in self.models.items()
            for version, entry in versions.items()
        }
        entries |= {(name, ""): entry for name in self.models if (entry := self.newest(name))}
        return {key: entry for key, entry in entries.items() if entry.state is ModelState.READY}

    def newest(self, name: str) -> ModelEntry | None:
        """The newest READY version, else the newest of any state, else None."""
        versions = self.models.get(name)
        if not versions:
            return None
        ordered = sorted(versions.values(), key=lambda entry: int(entry.spec.version), reverse=True)
        return next((e for e in ordered if e.state is ModelState.READY), ordered[0])

    def model(self, name: str, version: str = "") -> ModelEntry:
        """The entry of a model, in any state; without a version the newest that is ready.

        Raises:
            NotFound: no such model, or no such version of it.
        """
        entry = self.models.get(name, {}).get(version) if version else self.newest(name)
        if entry is None:
            which = f" version {version}" if version and self.models.get(name) else ""
            raise NotFound(
                f"Request for unknown model: '{name}'{which} is not found; the repository index"
                " lists what there is"
            )
        return entry

    def latest(self, entry: ModelEntry) -> ModelEntry:
        """The same version as it is in this snapshot, or `entry` while that may still be served."""
        found = self.models.get(entry.spec.name, {}).get(entry.spec.version)
        if found is entry or found is None or not found.instances:
            return entry
        return found if found.spec.takes_the_same(entry.spec) else entry

    def refreshed(self, entry: ModelEntry) -> ModelEntry:
        """The same version as it is in this snapshot.

        Raises:
            NotFound, Unavailable: it is served no more, or as something that takes other
                requests than `entry`.
        """
        spec = entry.spec
        current = require_ready(self.model(spec.name, spec.version), spec.version)
        if not current.spec.takes_the_same(spec):
            raise Unavailable(
                f"model '{spec.name}' has been replaced by one with other inputs or outputs"
            )
        return current

    @property
    def ready(self) -> bool:
        """Whether every model that is required is loaded, with an executor to run it.

        Of all models, one that was loaded, or failed to, or is loading by a later request is not
        required; once it serves it counts as any other.
        """
        return not (self._hindrance or self._missing)

    @property
    def why_not_ready(self) -> str:
        """What is missing, in words for clients; empty: nothing is."""
        if self._hindrance:
            return self._hindrance
        names = self._missing
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{', '.join(names[:_NAMED])}{more}"

    @cached_property
    def _hindrance(self) -> str:
        """What keeps it from being ready whatever is loaded."""
        if self.draining:
            return "it is about to stop"
        if self.shortage:
            return self.shortage
        if self.unserved:
            return " and ".join(f"no {FRONTENDS[kind]} serves" for kind in sorted(self.unserved))
        if self.complete:
            return ""
        why = self.notices.get("", "")
        return f"it has not read its repository yet{f' ({why})' if why else ''}"

    @cached_property
    def _missing(self) -> list[str]:
        """Models that are required and cannot be used, each with why."""
        if self.requires == ANY:
            served = any(entry.instances for entry in self.ready_entries.values())
            return [] if served else ["no model is ready"]
        if self.requires != ALL:
            return [why for name in self.requires if (why := self._lacks(name))]
        failed = [f"'{key}' cannot be served" for key in self.failed]
        return failed + [
            f"'{name}' version {version} {_lack(entry)}"
            for name, versions in self.models.items()
            for version, entry in versions.items()
            if (entry.required or entry.state is ModelState.READY) and _lack(entry)
        ]

    def _lacks(self, name: str) -> str:
        """Why a model that the setting names cannot be used; empty: it can."""
        entry = self.newest(name)
        why = "is not loaded" if entry is None else _lack(entry)
        return f"'{name}' {why}" if why else ""


def _lack(entry: ModelEntry) -> str:
    """What is wrong with a version; empty: it can be used."""
    if entry.state is ModelState.READY:
        return "" if entry.instances else "has no instance"
    return f"is {entry.state.lower()}"


def require_ready(entry: ModelEntry, version: str) -> ModelEntry:
    """The entry itself, which was asked for by this version (empty: by none).

    Raises:
        NotFound: no version of the model can be used.
        Unavailable: the version is not ready (now).
    """
    if entry.state is not ModelState.READY:
        name = entry.spec.name
        if not version and entry.state is not ModelState.LOADING:
            why = f": {entry.reason}" if entry.reason and entry.spec.steps else ""
            raise NotFound(f"Request for unknown model: '{name}' has no available versions{why}")
        raise Unavailable(
            f"Request for unknown model: '{name}' version {entry.spec.version} "
            "is not at ready state"
        )
    return entry
