"""Region kinds: kinds of client memory and their differences. A new kind is a new row."""

from typing import Final

from msgspec import Struct

SYSTEM, CUDA = "system", "cuda"  # families


class RegionKind(Struct, frozen=True):
    """Kind of client memory.

    Attributes:
        kind: name in messages.
        family: requests of the shared-memory extension that list and unregister the region.
        called: name in errors for clients.
        counted_as: name in metrics.
        has_key: True if clients name the object, so that processes can open it again.
        has_descriptor: True if processes pass the object's descriptor on.
        keeps_size: True if the owner cannot take memory away from processes that have mapped it.
        closes_late: True if an unregistration waits until executors have closed the memory.
        device: prefix of the device's name; empty for the host's memory.
    """

    kind: str
    family: str
    called: str
    counted_as: str
    has_key: bool = False
    has_descriptor: bool = True
    keeps_size: bool = True
    closes_late: bool = False
    device: str = ""


BY_KEY: Final = RegionKind(SYSTEM, SYSTEM, "system", "system", has_key=True, keeps_size=False)
MEMFD: Final = RegionKind(SYSTEM, SYSTEM, "system", "sealed")
CUDA_MEMORY: Final = RegionKind(
    CUDA, CUDA, "CUDA", "cuda", has_descriptor=False, closes_late=True, device="cuda"
)
_ALL: Final = (MEMFD, BY_KEY, CUDA_MEMORY)
KINDS: Final = {one.kind: one for one in _ALL}


def kind_of(kind: str, sealed: bool) -> RegionKind:
    """Return the kind of a region from the fields of a message.

    A memfd has the kind "system" in messages, with `sealed` set. Kinds of a newer generation are
    unknown here and count as the most fragile kind.
    """
    return MEMFD if sealed and kind == MEMFD.kind else KINDS.get(kind, BY_KEY)
