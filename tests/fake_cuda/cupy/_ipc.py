"""Handles of the fake driver, which name another process's memfd in /proc."""

import os
import struct
from pathlib import Path

from cupy import _fake
from cupy._fake import Allocation, CUDARuntimeError

HANDLE = struct.Struct("<8sIIQQ16sQ8x")  # magic, pid, fd, start of the process, inode, uuid, bytes
MAGIC = b"fakecuda"
LAZY_PEER_ACCESS = 1


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def get_handle(devPtr: int) -> bytes:
    """Return the handle of the whole allocation that contains the pointer."""
    _fake.enter()
    found = _fake.find(devPtr)
    if found is None or found.handle:
        raise CUDARuntimeError(1)
    uuid, inode = _fake.devices[found.device].uuid.bytes, os.fstat(found.fd).st_ino
    return HANDLE.pack(MAGIC, _fake.PID, found.fd, _started(_fake.PID), inode, uuid, found.nbytes)


def open_handle(handle: bytes, flags: int = LAZY_PEER_ACCESS) -> int:
    """Open a handle for the current device, or for a device within its reach.

    A process opens each handle once and counts further calls.
    """
    current = _fake.get_device()
    if len(handle) != HANDLE.size:
        raise IndexError(f"expected {HANDLE.size}, got {len(handle)}")
    magic, pid, fd, started, inode, uuid, nbytes = HANDLE.unpack(handle)
    owners = [k for k, device in enumerate(_fake.devices) if device.uuid.bytes == uuid]
    if flags != LAZY_PEER_ACCESS or magic != MAGIC or not owners:
        raise CUDARuntimeError(1)
    if pid == _fake.PID:
        raise CUDARuntimeError(201)
    if owners[0] != current and not _fake.can_access_peer(current, owners[0]):
        raise CUDARuntimeError(217)
    with _fake.lock:
        opened = [a for a in list(_fake.allocations.values()) if a.handle == handle]
        if not opened:
            base = _map_foreign(pid, fd, started, inode, nbytes)
            opened = [Allocation(base, nbytes, owners[0], handle=bytes(handle))]
            _fake.enlist(opened[0])
        opened[0].opened += 1
        return opened[0].base


def _map_foreign(pid: int, fd: int, started: int, inode: int, nbytes: int) -> int:
    try:
        if _started(pid) != started:
            raise CUDARuntimeError(400)
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as ex:
        raise CUDARuntimeError(205 if os.path.exists(f"/proc/{pid}/fd") else 400) from ex
    except OSError as ex:
        raise CUDARuntimeError(400) from ex
    try:
        if os.fstat(mine).st_ino != inode or os.fstat(mine).st_size != nbytes:
            raise CUDARuntimeError(205)
        return _fake.map_memory(nbytes, mine)
    finally:
        os.close(mine)


def close_handle(devPtr: int) -> None:
    _fake.enter()
    with _fake.lock:
        found = _fake.allocations.get(devPtr)
        if found is None or not found.handle:
            raise CUDARuntimeError(1)
        found.opened -= 1
        if not found.opened:
            _fake.drop(found)
