"""Memory that clients pass as descriptors: the supported kinds and their checks."""

import fcntl
import os
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from shmserve.core.region_kinds import MEMFD, RegionKind
from shmserve.errors import InvalidArgument

REFUSAL = "the descriptor must be a memfd sealed with F_SEAL_SHRINK and F_SEAL_GROW"


class PassedKind(Struct, frozen=True):
    """A kind of memory that clients pass.

    Attributes:
        kind: properties of all such memory.
        recognizes: returns True if a descriptor is of the kind. Never waits.
        check: raises InvalidArgument if the memory cannot be mapped without surprises, now and
            later. Takes the descriptor and the region's name.
    """

    kind: RegionKind
    recognizes: Callable[[int], bool]
    check: Callable[[int, str], None]


def recognized(fd: int) -> PassedKind | None:
    """Return the kind of memory of a client's descriptor, or None for any other descriptor."""
    return next((passed for passed in PASSED if passed.recognizes(fd)), None)


def is_sealed_memory(fd: int) -> bool:
    """Return True if `fd` is memory of constant size. Never waits, whatever `fd` is.

    Only memfds can be sealed; objects of shm_open cannot. Callers that do not trust `fd` rely on
    the order: fstat of a file may wait for the server of its file system, so this check comes
    first.
    """
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed
    except OSError:
        return False


def check_sealed(fd: int, region: str) -> None:
    """Check that a sealed object can be mapped without surprises, now and later. Raise
    InvalidArgument if the object is not writable, or has huge pages, which may be missing when
    touched."""
    readonly = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & readonly or mode != os.O_RDWR:
        raise InvalidArgument(f"shared memory region '{region}': the memory must be writable")
    if os.fstatvfs(fd).f_bsize != os.sysconf("SC_PAGE_SIZE"):
        raise InvalidArgument(f"shared memory region '{region}': huge pages are not supported")


PASSED: Final = (PassedKind(MEMFD, is_sealed_memory, check_sealed),)
