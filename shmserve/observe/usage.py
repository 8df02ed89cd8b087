"""Resource use of processes, from /proc. Values that cannot be read are left out."""

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST = 16384  # bytes of a read
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
    """Return a file to its end, in half of the system calls of `open`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _MOST), b""))
    finally:
        os.close(fd)


def machine_memory() -> int:
    """Return the machine's memory in bytes, or 0 if unknown."""
    try:
        with open("/proc/meminfo", "rb") as file:
            return int(file.readline().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def anonymous_memory(pid: int) -> int | None:
    """Return the bytes of a process's anonymous memory, swapped pages included. Pages that other
    processes have as well, since a fork, count in full. Takes microseconds. Return None if the
    process has ended, or the kernel does not tell."""
    found = _sizes(f"/proc/{pid}/status", b"RssAnon:", b"VmSwap:")
    return sum(found.values()) if b"RssAnon:" in found else None


def proportional_memory(pid: int) -> int | None:
    """Return the bytes as `anonymous_memory`, with only a share of a page that other processes have
    as well. Takes some 5 ms for each GiB."""
    found = _sizes(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Anonymous:", b"SwapPss:")
    resident = found.get(b"Pss_Anon:", found.get(b"Anonymous:"))  # kernels before 5.4
    if resident is None:  # kernels before 4.14, some sandboxes
        return anonymous_memory(pid)
    return resident + found.get(b"SwapPss:", 0)  # unlike Swap, without shared memory


def _sizes(path: str, *names: bytes) -> dict[bytes, int]:
    """Return those of the named lines that a file has, in bytes."""
    try:
        lines = (line.split() for line in _read(path).splitlines())
        return {words[0]: int(words[1]) * 1024 for words in lines if words and words[0] in names}
    except (OSError, ValueError, IndexError):
        return {}
