"""What processes use of the machine, from /proc. What cannot be read is left out."""

from __future__ import annotations

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_LINE = 4096  # bytes at most
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """`cpu_s`: processor time since its start. `private`: bytes of memory that are its own,
    without what it shares (arenas, regions, libraries). `started`: in clock ticks since boot;
    with the pid it names a process for good. `sleeps`: it waits, and was not stopped."""

    cpu_s: float
    private: int
    started: int
    sleeps: bool


def of_process(pid: int) -> Usage | None:
    """Of one process; None: it has ended, or is not ours to look at."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        _, resident, shared, *_ = _read(f"/proc/{pid}/statm").split()
        cpu = int(fields[11]) + int(fields[12])
        private = (int(resident) - int(shared)) * _PAGE
        return Usage(cpu / _TICKS, private, int(fields[19]), fields[0] == b"S")
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """A file of one short line; in a third of the system calls that `open` makes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _LINE)
    finally:
        os.close(fd)


def machine_memory() -> int:
    """Bytes of memory this machine has; 0: unknown."""
    try:
        with open("/proc/meminfo", "rb") as file:
            return int(file.readline().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
