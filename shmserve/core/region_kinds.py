"""Kinds of client memory, and what differs between them. A new kind is a new row."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

SYSTEM, CUDA = "system", "cuda"  # families


class RegionKind(Struct, frozen=True):
    """One kind of client memory.

    Attributes:
        kind: in messages.
        family: requests of the shared-memory extension that list and unregister it.
        called: in errors for clients.
        counted_as: in metrics.
        has_key: clients name the object, so it can be opened again.
        has_descriptor: processes pass the object's descriptor on.
        keeps_size: the owner cannot take memory away from processes that have mapped it.
        closes_late: an unregistration waits until executors have closed the memory.
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
    """Return the kind of a region by what messages say of it.

    Memory that came as a memfd is of the kind "system" there, and `sealed`. The kinds of a newer
    generation are unknown here; they count as the most fragile one.
    """
    return MEMFD if sealed and kind == MEMFD.kind else KINDS.get(kind, BY_KEY)
