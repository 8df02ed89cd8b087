"""Pool sizing: size of the pool from /dev/shm, the cgroup's memory limit and the setting."""

import os
import resource

from shmserve.transport.cgroups import memory_limit

SHM = "/dev/shm"
_STEP = 1 << 20


def shm_space() -> tuple[int, int]:
    """Return (size, free) of /dev/shm, in bytes."""
    space = os.statvfs(SHM)
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def pool_size(wanted: int, size: int, free: int, memory: int | None) -> tuple[int, str]:
    """Return (bytes of the pool, advice). The advice is one sentence on what to change if memory
    is too tight, or "".

    Args:
        wanted: setting, in bytes; 0 means half of /dev/shm or of the memory limit, whichever is
            less.
        size: size of /dev/shm, in bytes.
        free: free space of /dev/shm, in bytes.
        memory: the cgroup's memory limit, in bytes, which shared memory counts towards, or None.
    """
    pool = wanted or min(size // 2, memory // 2 if memory is not None else size)
    if pool > free:
        return pool, (
            f"the pool may grow to {_mib(pool)} but {SHM} has {_mib(free)} free: lower "
            f"SHMSERVE_POOL_BYTES or enlarge {SHM} (mount -o remount,size=..., "
            "docker --shm-size)"
        )
    if memory is not None and pool > memory * 3 // 4:
        return pool, (
            f"the pool may grow to {_mib(pool)} but this cgroup's memory limit is "
            f"{_mib(memory)}: lower SHMSERVE_POOL_BYTES or raise the limit (MemoryMax, "
            "docker --memory)"
        )
    return pool, ""


def host_pool(wanted: int) -> tuple[int, str]:
    """Return `pool_size` for the host and cgroup of this process."""
    return pool_size(wanted, *shm_space(), memory_limit())


def largest_file() -> int | None:
    """Return this process's limit on the size of files, in bytes, or None if no limit is set. A
    segment is a file to the kernel."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def arena_size(pool: int, processes: int, wanted: int, largest: int | None) -> tuple[int, str]:
    """Return (bytes of each process's first segment, advice). The advice is one sentence on what
    to change, or "". `largest`: limit on the size of a segment, in bytes, or None.

    First segments take at most half of the pool; the rest is for large tensors.
    """
    share = pool // (2 * processes) // _STEP * _STEP
    if share < _STEP:
        return _STEP, (
            f"the pool of {_mib(pool)} is too small for {processes} processes: set "
            f"SHMSERVE_POOL_BYTES to {2 * processes * _STEP} or more"
        )
    size = min(wanted, share)
    if largest is not None and largest < size:
        return largest // _STEP * _STEP, (
            f"files, and so tensors, may have {_mib(largest)} at most: raise the limit "
            "(LimitFSIZE, ulimit -f)"
        )
    return size, ""


def shortage(pool: int, free: int, processes: int) -> str:
    """Return why memory does not suffice for every process, so that requests would be refused.
    Return "" if memory suffices."""
    size = min(pool, free)
    if size >= processes * _STEP:
        return ""
    return f"{size >> 10} KiB of shared memory are too little for {processes} processes"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
