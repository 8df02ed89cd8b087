"""The registry's published form: what every frontend knows without asking.

The coordinator alone writes it (I10). A `Snapshot` is immutable; every change makes
a new one with a higher `generation`. How it is published: `shmserve.shm.registry_page`.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from shmserve.tensor.spec import ModelSpec


class ModelState(StrEnum):
    """States of a model version, as the repository index names them."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class LiveInstance(Struct, frozen=True):
    """An instance that takes requests. `process` changes with every life of its executor."""

    name: str
    process: str
    endpoint: str
    pid: int


class ModelEntry(Struct, frozen=True):
    """One version of a model. Only instances in `instances` take requests now.

    READY with no instances: its executors are being restarted; requests get a clear 503.
    """

    spec: ModelSpec
    state: ModelState
    instances: tuple[LiveInstance, ...] = ()
    reason: str = ""


class Region(Struct, frozen=True):
    """Client memory registered under a name: `byte_size` bytes from `offset` of an object.

    Attributes:
        number: what processes call it; never used again within an epoch.
        uid: who registered it (-1: a remote caller); `pid` and `started` (its start in clock
            ticks since boot) name the process, 0: not known.
        device, inode, object_bytes: the object as it was when it was registered.
        copy: reached by copying only, never mapped (its owner has pulled memory away before).
        sealed: nobody can make its object smaller, so mapping it is safe for everybody.
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
    kind: str = "system"
    copy: bool = False
    quarantined: str = ""
    sealed: bool = False

    @property
    def end(self) -> int:
        """Where it ends in its object: the size that the object must keep."""
        return self.offset + self.byte_size


class Snapshot(Struct, frozen=True):
    """All of it at one generation.

    `models`: name -> version -> entry. `expected`: names that must be READY before
    the server is (loaded at start). `draining`: the service is about to stop. `regions`:
    by `core.regions.region_key`; `next_region`: the number the next one gets. `grps_online`:
    whether GRPS's load balancers should send requests here.
    """

    epoch: str
    generation: int
    models: dict[str, dict[str, ModelEntry]] = {}
    complete: bool = False  # every repository folder has been looked at and told below
    failed: dict[str, str] = {}  # models that could not even be described, and why
    draining: bool = False
    regions: dict[str, Region] = {}
    next_region: int = 1
    grps_online: bool = False

    def newest(self, name: str) -> ModelEntry | None:
        """The newest READY version, else the newest of any state, else None."""
        versions = self.models.get(name)
        if not versions:
            return None
        if len(versions) == 1:  # nearly always, and on every request
            return next(iter(versions.values()))
        ordered = sorted(versions.values(), key=lambda entry: int(entry.spec.version), reverse=True)
        return next((e for e in ordered if e.state is ModelState.READY), ordered[0])

    @property
    def ready(self) -> bool:
        """Whether every model that should be loaded is, with an executor to run it."""
        if not self.complete or self.draining or self.failed:
            return False
        return all(
            entry.state is ModelState.READY and bool(entry.instances)
            for versions in self.models.values()
            for entry in versions.values()
        )
