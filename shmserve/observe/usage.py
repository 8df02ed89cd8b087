"""Resource use of processes, from /proc. Values that cannot be read are left out."""

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST = 16384  # bytes of a file
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Resource use of a process.

    Attributes:
        cpu_s: processor time since the start of the process, in seconds.
        private: bytes of private memory, without shared memory (arenas, regions, libraries).
        resident: bytes of resident memory, shared memory included.
        started: start time, in clock ticks since boot; pid and start time identify a process for
            good.
        sleeps: True if the process waits, False if it runs or was stopped.
    """

    cpu_s: float
    private: int
    resident: int
    started: int
    sleeps: bool


def of_process(pid: int) -> Usage | None:
    """Return the use of a process, or None if the process has ended or cannot be read."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        _, resident, shared, *_ = _read(f"/proc/{pid}/statm").split()
        cpu = int(fields[11]) + int(fields[12])
        private, whole = (int(resident) - int(shared)) * _PAGE, int(resident) * _PAGE
        return Usage(cpu / _TICKS, private, whole, int(fields[19]), fields[0] == b"S")
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """Return a short file, in a third of the system calls of `open`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST)
    finally:
        os.close(fd)


def machine_memory() -> int:
    """Return the machine's memory in bytes, or 0 if unknown."""
    try:
        with open("/proc/meminfo", "rb") as file:
            return int(file.readline().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def mapped_memory(pid: int) -> int | None:
    """Return the bytes of a process's memory, swapped pages included, and shared memory and tmpfs
    left out. Pages that other processes map as well count in full. Takes microseconds. Return None
    if the process has ended."""
    return _kib(f"/proc/{pid}/status", b"RssAnon:", b"RssFile:", b"VmSwap:")


def proportional_memory(pid: int) -> int | None:
    """Return the bytes as `mapped_memory`, with only a share of a page that other processes map as
    well. Takes some 5 ms for each GiB."""
    resident = _kib(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_File:")
    if resident is None:  # the kernel may be without this file
        used = of_process(pid)
        resident = None if used is None else used.private
    swapped = _kib(f"/proc/{pid}/status", b"VmSwap:")
    return None if resident is None or swapped is None else resident + swapped


def _kib(path: str, *names: bytes) -> int | None:
    """Return the sum of these lines of a file, in bytes. Return None without the file."""
    try:
        lines = (line.split() for line in _read(path).splitlines())
        return sum(int(words[1]) for words in lines if words and words[0] in names) * 1024
    except (OSError, ValueError, IndexError):
        return None
