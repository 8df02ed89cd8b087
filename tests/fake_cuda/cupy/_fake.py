"""Driver behind the fake CuPy: devices, device memory, pinned host memory.

Device memory is memfds, so IPC works between processes. A pointer is the address of a mapping of a
memfd named ``fakecuda<device>:<bytes>``, with the host's number of the device. Mistakes that the
real driver sometimes tolerates fail here.

Environment, beside the variables of fake_devices:

- FAKE_CUDA_MEMORY: bytes of a device, and the limit of a process on it
- FAKE_CUDA_PEERS: "0": devices do not reach each other
- FAKE_CUDA_PIN: "all"; "readonly" (default): read-only mappings need the flag; "writable": devices
  do not know the flag; "no": not permitted
- FAKE_CUDA_BROKEN: a path: once the file exists, a process that waits for the device loses it
"""

import bisect
import ctypes
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import fake_devices

ERRORS = {
    1: "InvalidValue: invalid argument",
    2: "MemoryAllocation: out of memory",
    3: "InitializationError: initialization error",
    35: "InsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "NoDevice: no CUDA-capable device is detected",
    101: "InvalidDevice: invalid device ordinal",
    201: "DeviceUninitialized: invalid device context",
    205: "MapBufferObjectFailed: mapping of buffer object failed",
    217: "PeerAccessUnsupported: peer access is not supported between these two devices",
    304: "OperatingSystem: OS call failed or operation not supported on this OS",
    400: "InvalidResourceHandle: invalid resource handle",
    700: "IllegalAddress: an illegal memory access was encountered",
    712: "HostMemoryAlreadyRegistered: part or all of the requested memory range is already mapped",
    713: "HostMemoryNotRegistered: pointer does not correspond to a registered memory region",
    801: "NotSupported: operation not supported",
}
READ_ONLY = 8  # cudaHostRegisterReadOnly
POISON = 0xA5  # content of new device memory, in its first POISONED bytes
POISONED = 1 << 16

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError{ERRORS[status]}")


@dataclass
class Allocation:
    """Device memory this process can reach: allocated here (`fd`) or opened (`handle`)."""

    base: int
    nbytes: int
    device: int
    fd: int = -1
    handle: bytes = b""
    opened: int = 0


lock = threading.RLock()
allocations: dict[int, Allocation] = {}
pinned: dict[int, tuple[int, int]] = {}  # hostRegister: address to bytes and flags
host_memory: dict[int, int] = {}  # hostAlloc: address to bytes
contexts: set[int] = set()  # devices that the process has begun to use
devices = fake_devices.visible()
_order: list[int] = []  # the keys of `allocations`, sorted
_current = threading.local()
_lost = False
PID = os.getpid()


# -------------------------------------------------------------------------------------- devices


def enter() -> None:
    """Make the checks that begin every call."""
    if not fake_devices.has_driver():
        raise CUDARuntimeError(35)
    if os.getpid() != PID:  # CUDA does not survive a fork
        raise CUDARuntimeError(3)
    if not devices:
        raise CUDARuntimeError(100)
    if _lost:
        raise CUDARuntimeError(700)


def usable() -> bool:
    """Return True if calls can succeed in this process."""
    return not _lost and os.getpid() == PID


def lose() -> CUDARuntimeError:
    """No call will succeed from now on, as after a kernel's illegal access."""
    global _lost
    _lost = True
    return CUDARuntimeError(700)


def waited() -> None:
    """Synchronising is where an asynchronous error shows."""
    broken = os.environ.get("FAKE_CUDA_BROKEN")
    if broken and os.path.exists(broken):
        raise lose()


def check_device(device: int) -> None:
    enter()
    if not 0 <= device < len(devices):
        raise CUDARuntimeError(101)


def get_device() -> int:
    enter()
    return getattr(_current, "device", 0)


def set_device(device: int) -> None:
    """Make a device current and create its context, as from CUDA 12 on."""
    check_device(device)
    contexts.add(device)
    _current.device = device


def get_context() -> int:
    """Return the context of the calling thread, or 0 before the first use."""
    enter()
    return 0x100 + _current.device if hasattr(_current, "device") else 0


def can_access_peer(device: int, peer: int) -> bool:
    check_device(device)
    check_device(peer)
    return device != peer and os.environ.get("FAKE_CUDA_PEERS", "1") != "0"


# --------------------------------------------------------------------------------------- memory


def map_memory(nbytes: int, fd: int = -1) -> int:
    """Return the address of a new mapping of a memfd, or of private zeros."""
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise CUDARuntimeError(2)
    return int(address)


def unmap_memory(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def _mark_importer() -> int:
    """Make a mapping that shows in /proc/PID/maps that the process has imported this package."""
    fd = os.memfd_create("fakecupy")
    os.ftruncate(fd, mmap.PAGESIZE)
    try:
        return map_memory(mmap.PAGESIZE, fd)
    finally:
        os.close(fd)


_mark = _mark_importer()


def find(address: int, nbytes: int = 1) -> Allocation | None:
    """Return the allocation that contains all of these bytes."""
    with lock:
        place = bisect.bisect_right(_order, address) - 1
        found = allocations[_order[place]] if place >= 0 else None
    inside = found is not None and address + nbytes <= found.base + found.nbytes
    return found if inside else None


def enlist(allocation: Allocation) -> int:
    allocations[allocation.base] = allocation
    bisect.insort(_order, allocation.base)
    return allocation.base


def drop(allocation: Allocation) -> None:
    del allocations[allocation.base]
    _order.remove(allocation.base)
    unmap_memory(allocation.base, allocation.nbytes)
    if allocation.fd >= 0:
        os.close(allocation.fd)


def used(device: int) -> int:
    """Return the bytes that this process has allocated on a device."""
    return sum(a.nbytes for a in list(allocations.values()) if a.device == device and a.fd >= 0)


def malloc(size: int) -> int:
    device = get_device()
    if size == 0:
        return 0
    nbytes = -(-size // 512) * 512
    with lock:
        if used(device) + nbytes > fake_devices.memory_bytes():
            raise CUDARuntimeError(2)
        fd = os.memfd_create(f"fakecuda{devices[device].index}:{nbytes}")
        os.ftruncate(fd, nbytes)
        base = map_memory(nbytes, fd)
        ctypes.memset(base, POISON, min(nbytes, POISONED))
        return enlist(Allocation(base, nbytes, device, fd))


def free(base: int) -> None:
    enter()
    with lock:
        found = allocations.get(base)
        if found is None or found.handle:
            raise CUDARuntimeError(1)
        drop(found)


def shut_down() -> None:
    """Free all memory and let every call fail. For tests that had the driver in their process."""
    lose()
    for allocation in list(allocations.values()):
        drop(allocation)
    for address, nbytes in [*host_memory.items(), (_mark, mmap.PAGESIZE)]:
        unmap_memory(address, nbytes)


# ---------------------------------------------------------------------------------- host memory


def _mapped(address: int, nbytes: int) -> str:
    """Return "rw", or "r" if some of these bytes are read-only, or "" if some are not mapped."""
    end, rights = address + nbytes, "rw"
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high and mode.startswith("r"):
            rights = rights if mode.startswith("rw") else "r"
            address = high
            if address >= end:
                return rights
    return ""


def pins_read_only() -> bool:
    return os.environ.get("FAKE_CUDA_PIN") != "writable"


def pin(ptr: int, size: int, flags: int) -> None:
    enter()
    mode = os.environ.get("FAKE_CUDA_PIN", "readonly")
    if mode == "no":
        raise CUDARuntimeError(304)
    if flags & READ_ONLY and not pins_read_only():
        raise CUDARuntimeError(801)
    with lock:
        known = [*pinned.items(), *((a, (n, 0)) for a, n in host_memory.items())]
        if any(a < ptr + size and ptr < a + n for a, (n, _) in known):
            raise CUDARuntimeError(712)
        rights = _mapped(ptr, size) if size > 0 else ""
        if not rights or (mode != "all" and rights == "r" and not flags & READ_ONLY):
            raise CUDARuntimeError(1)
        pinned[ptr] = size, flags


def unpin(ptr: int) -> None:
    enter()
    if pinned.pop(ptr, None) is None:
        raise CUDARuntimeError(713)
