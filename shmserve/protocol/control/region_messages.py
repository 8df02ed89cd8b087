"""Messages of the link about client memory. `messages` has the unions."""

from shmserve.core.region_kinds import SYSTEM
from shmserve.core.registry import Region
from shmserve.protocol.control.message import Message


class RegisterRegion(Message, frozen=True):
    """Request of a frontend: register memory for a client.

    Attributes:
        uid: the client's user id, from the kernel; -1: a remote client.
        pid: the client's process id, from the kernel.
        started: start time of the client's process, from the kernel.
        again: the request was sent before, and the answer may have been lost.
    """

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
    """Request of a frontend: register GPU memory, named by a cudaIpcMemHandle_t, for a client.
    Other fields are as in `RegisterRegion`."""

    ticket: int
    name: str
    handle: bytes
    device_id: int
    byte_size: int
    uid: int
    pid: int
    started: int
    again: bool = False

    def __repr__(self) -> str:  # without the handle, which lets any process open the memory
        return f"RegisterCudaRegion({self.ticket}, {self.name!r}, {self.byte_size} bytes)"


class UnregisterRegions(Message, frozen=True):
    """Request of a frontend: remove a region of a client, by name and kind. An empty name removes
    all of the client's regions of the kind."""

    ticket: int
    name: str
    uid: int
    kind: str = SYSTEM


class RegionProbed(Message, frozen=True):
    """Reply to `ProbeRegion`: the handle leads to an allocation of `nbytes` bytes. With
    `error_code` INVALID_ARGUMENT, the handle leads nowhere: `error` tells the client the reason,
    without handles or addresses. Any other error means that the executor cannot decide."""

    ticket: int
    nbytes: int = 0
    error_code: str = ""
    error: str = ""


class RegionsClosed(Message, frozen=True):
    """Report of an executor: CUDA regions are closed, after unregistration or a failed opening."""

    numbers: tuple[int, ...]


class NeedRegion(Message, frozen=True):
    """Request of an executor for a region, to map the memory or to open the handle."""

    ticket: int
    number: int


class RegionShrunk(Message, frozen=True):
    """Report of an executor: a region's object is smaller than at registration."""

    number: int


class StoredRegions(Message, frozen=True):
    """Descriptors kept by the supervisor, sent to a new coordinator in parts. The fds ride along.

    Attributes:
        numbers: numbers of the regions, in the order of the fds.
        more: further parts follow.
        regions: descriptions that the supervisor has kept with the fds.
    """

    numbers: tuple[int, ...]
    more: bool = False
    regions: tuple[Region, ...] = ()


class RegionAnswer(Message, frozen=True):
    """Reply to `RegisterRegion`, `RegisterCudaRegion` and `UnregisterRegions`. Sent after
    publication."""

    ticket: int
    error_code: str = ""
    error: str = ""


class RegionGiven(Message, frozen=True):
    """Reply to `NeedRegion`. Unless there is an error, the fd of a system region rides along.
    `gone`: the region has been unregistered since. The region serves requests that were accepted
    before, and the executor must not keep the mapping."""

    ticket: int
    region: Region | None = None
    gone: bool = False
    error_code: str = ""
    error: str = ""


class ProbeRegion(Message, frozen=True):
    """Question to an executor on a GPU: can the handle be opened, and how large is the memory? The
    region is not registered yet and has no number."""

    ticket: int
    region: Region


class RegionsGone(Message, frozen=True):
    """Report to executors: regions were unregistered."""

    numbers: tuple[int, ...]


class StoreRegions(Message, frozen=True):
    """Order to the supervisor: keep the fds that ride along for the next coordinator. `regions`:
    descriptions to keep with the fds, as in `StoredRegions`, for the next service."""

    numbers: tuple[int, ...]
    regions: tuple[Region, ...] = ()


class SharedRegions(Message, frozen=True):
    """Changes of regions, exchanged by the coordinators of two generations in both directions.

    Attributes:
        regions: new regions; fds ride along for those that have fds.
        gone: numbers of removed regions.
        next_number: number of the sender's next region.
    """

    ticket: int
    regions: tuple[Region, ...] = ()
    gone: tuple[int, ...] = ()
    next_number: int = 0


class RegionsTaken(Message, frozen=True):
    """Reply to `SharedRegions`, sent after publication."""

    ticket: int


class DropRegions(Message, frozen=True):
    """Order to the supervisor: close the fds of these regions."""

    numbers: tuple[int, ...]
