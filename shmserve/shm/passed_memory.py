"""Memory that clients pass as descriptors: which kinds are known, and what is checked of each."""

from __future__ import annotations

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
        kind: what is known of all such memory.
        recognizes: returns whether a descriptor is of the kind. Never waits.
        check: raises InvalidArgument if the memory (of the region named) cannot be mapped, now
            and later, without surprises.
    """

    kind: RegionKind
    recognizes: Callable[[int], bool]
    check: Callable[[int, str], None]


def recognized(fd: int) -> PassedKind | None:
    """Return the kind of memory that a descriptor of a client is of; None: of none."""
    return next((passed for passed in PASSED if passed.recognizes(fd)), None)


def is_sealed_memory(fd: int) -> bool:
    """Whether it is memory that keeps its size; never waits, whatever `fd` is.

    Only memfds can be sealed: objects of shm_open refuse it. The order matters to callers
    that do not trust `fd`: fstat of a file may wait for whoever serves its file system.
    """
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed
    except OSError:
        return False


def check_sealed(fd: int, region: str) -> None:
    """Check that a sealed object can be mapped, now and later, without surprises.

    Raises:
        InvalidArgument: it cannot be written, or consists of huge pages, which may be missing
            when they are touched.
    """
    readonly = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & readonly or mode != os.O_RDWR:
        raise InvalidArgument(f"shared memory region '{region}': the memory must be writable")
    if os.fstatvfs(fd).f_bsize != os.sysconf("SC_PAGE_SIZE"):
        raise InvalidArgument(f"shared memory region '{region}': huge pages are not supported")


PASSED: Final = (PassedKind(MEMFD, is_sealed_memory, check_sealed),)
