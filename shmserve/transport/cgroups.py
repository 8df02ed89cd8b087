"""Cgroups: limits of memory and processors that hold for this process, of cgroup v1 and v2.

Limits of all ancestors hold as well. A file that is missing or unreadable limits nothing.
"""

import os
from collections.abc import Iterator

_ROOT = "/sys/fs/cgroup"
_MEMBERSHIP = "/proc/self/cgroup"
# of the smallest service; with less, the kernel kills the master over and over
_LEAST_BYTES = 64 << 20


def memory_limit(root: str = _ROOT, membership: str = _MEMBERSHIP) -> int | None:
    """Return the lowest memory limit, in bytes, or None without a limit."""
    texts = _texts("memory", "memory.max", "memory.limit_in_bytes", root, membership)
    limits = [int(text) for text in texts if text.isdigit()]
    # cgroup v1 writes a huge number for none
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def too_little_memory(limit: int | None) -> str:
    """Return why the service cannot start within a memory limit, in bytes, or ""."""
    if limit is None or limit >= _LEAST_BYTES:
        return ""
    return (
        f"this cgroup's memory limit is {limit >> 20} MiB (MemoryMax, docker --memory), and the"
        f" service needs {_LEAST_BYTES >> 20} MiB at least, without its models"
    )


def processors(root: str = _ROOT, membership: str = _MEMBERSHIP) -> float:
    """Return how many processors this process may use at a time: by affinity and by quota."""
    count = float(len(os.sched_getaffinity(0)))
    for text in _texts("cpu", "cpu.max", "cpu.cfs_quota_us", root, membership):
        quota, _, period = text.partition(" ")
        # without a quota v2 has "max", v1 has -1; v1's period is nearly always the default
        if quota.isdigit():
            count = min(count, int(quota) / int(period or 100_000))
    return count


def throttled(root: str = _ROOT, membership: str = _MEMBERSHIP) -> int:
    """Return how many periods have ended early because the processor quota was used up."""
    total = 0
    for text in _texts("cpu", "cpu.stat", "cpu.stat", root, membership):
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled":
                total += int(value)
    return total


def _texts(controller: str, v2: str, v1: str, root: str, membership: str) -> Iterator[str]:
    """Return the contents of a file of each cgroup that this process belongs to. `v2` and `v1`:
    the file's name in either version."""
    for path in _files(controller, v2, v1, root, membership):
        try:
            with open(path, encoding="ascii") as file:
                yield file.read().strip()
        except OSError:
            continue


def _files(controller: str, v2: str, v1: str, root: str, membership: str) -> Iterator[str]:
    try:
        with open(membership, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, v2
        elif controller in controllers.split(","):
            base, name = os.path.join(root, controller), v1
        else:
            continue
        while True:
            yield os.path.join(base, path.lstrip("/"), name)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
