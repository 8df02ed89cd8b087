"""Messages of the link about client memory; `messages` has the unions they belong to."""

from __future__ import annotations

from shmserve.core.region_kinds import SYSTEM
from shmserve.core.registry import Region
from shmserve.protocol.control.message import Message


class RegisterRegion(Message, frozen=True):
    """A frontend's client registers memory. `uid` (-1: remote), `pid` and `started` are its
    own, from the kernel. `again`: asked before, and the answer may have been lost."""

    ticket: int
    name: str
    key: str
    offset: int
    byte_size: int
    uid: int
    pid: int
    started: int
    again: bool = False


class RegisterCudaRegion(Message, frozen=True):
    """As `RegisterRegion`, of GPU memory that a cudaIpcMemHandle_t names."""

    ticket: int
    name: str
    handle: bytes
    device_id: int
    byte_size: int
    uid: int
    pid: int
    started: int
    again: bool = False

    def __repr__(self) -> str:  # without the handle: whoever has it can open the memory
        return f"RegisterCudaRegion({self.ticket}, {self.name!r}, {self.byte_size} bytes)"


class UnregisterRegions(Message, frozen=True):
    """A frontend's client removes one of its regions of a kind, or all of them (empty name)."""

    ticket: int
    name: str
    uid: int
    kind: str = SYSTEM


class RegionProbed(Message, frozen=True):
    """Reply to `ProbeRegion`: the handle leads to an allocation with `nbytes` bytes. With
    `error_code` INVALID_ARGUMENT it does not: `error` tells the client why, without any
    handle or address. Any other error: the executor cannot tell."""

    ticket: int
    nbytes: int = 0
    error_code: str = ""
    error: str = ""


class RegionsClosed(Message, frozen=True):
    """An executor has closed the handles of CUDA regions that are no more, or that it was given
    and could not open."""

    numbers: tuple[int, ...]


class NeedRegion(Message, frozen=True):
    """An executor wants to map a region, or to open its handle."""

    ticket: int
    number: int


class RegionShrunk(Message, frozen=True):
    """An executor found a region's object smaller than it was registered."""

    number: int


class StoredRegions(Message, frozen=True):
    """Supervisor to a new coordinator: fds it keeps, which ride along; the last has no `more`.
    `regions`: what is known of them."""

    numbers: tuple[int, ...]
    more: bool = False
    regions: tuple[Region, ...] = ()


class RegionAnswer(Message, frozen=True):
    """Reply to `RegisterRegion`, `RegisterCudaRegion` and `UnregisterRegions`, sent after the
    change is published."""

    ticket: int
    error_code: str = ""
    error: str = ""


class RegionGiven(Message, frozen=True):
    """Reply to `NeedRegion`; the fd of a system region rides along unless there is an error.
    `gone`: it has been unregistered since, so it serves requests accepted before and must not
    be kept."""

    ticket: int
    region: Region | None = None
    gone: bool = False
    error_code: str = ""
    error: str = ""


class ProbeRegion(Message, frozen=True):
    """To an executor on a GPU: can this handle be opened, and what does it lead to? The region
    is not registered yet and has no number."""

    ticket: int
    region: Region


class RegionsGone(Message, frozen=True):
    """To executors: these regions are no more."""

    numbers: tuple[int, ...]


class StoreRegions(Message, frozen=True):
    """To the supervisor: keep the fds that ride along for the next coordinator, and with `regions`,
    as `StoredRegions`, for the next service."""

    numbers: tuple[int, ...]
    regions: tuple[Region, ...] = ()


class SharedRegions(Message, frozen=True):
    """Between the coordinators of two generations, both ways: these regions have come, the fds of
    those that have any riding along, and these are gone. `next_number`: of the sender's next."""

    ticket: int
    regions: tuple[Region, ...] = ()
    gone: tuple[int, ...] = ()
    next_number: int = 0


class RegionsTaken(Message, frozen=True):
    """Reply to `SharedRegions`, after publication."""

    ticket: int


class DropRegions(Message, frozen=True):
    """To the supervisor: close the fds of these regions."""

    numbers: tuple[int, ...]
