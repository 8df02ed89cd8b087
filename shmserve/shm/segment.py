"""Segments: POSIX shared-memory objects of shmserve.

This file makes and removes every name. A name lives for the few microseconds between `shm_open`
and `shm_unlink`. Peers get a read-only file descriptor (SCM_RIGHTS), never a name, so no name can
be found, guessed or left behind. A process killed in between leaves a name, which `sweep` removes.

The process that writes a segment makes it, within a budget that the coordinator grants. Making and
populating 256 MiB takes over 100 ms, and the coordinator must stay able to answer.

A segment that is given back is first emptied with MADV_REMOVE. The memory is free at once,
although executors still have it mapped. The size stays, so no reader gets a SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import stat
import weakref

import posix_ipc

from shmserve.errors import ArenaExhausted

log = logging.getLogger(__name__)

_PREFIX = "shmserve."
_DIRECTORY = "/dev/shm"
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; missing in the mmap module of Python 3.11
_POPULATE_WRITE = 23

# The mmap module's madvise holds the GIL, and populating 256 MiB takes over 100 ms.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Shortage:
    """Shortage of shared memory. `logged`: True until a segment could be made again. A process
    without a first segment tries 20 times a second."""

    logged = False


_shortage = _Shortage()


class Segment:
    """A segment that this process owns and writes: `view` is the memory, `size` its bytes."""

    def __init__(self, epoch: str, size: int) -> None:
        """Make, reserve and populate a segment. Raise ArenaExhausted if the file system behind
        POSIX shared memory is full."""
        self.size = size
        self.fd = _create(epoch, size)
        try:
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError):
            os.close(self.fd)
            raise ArenaExhausted("the server has no address space for more tensors") from None
        self.view = memoryview(self._map)
        self.address = _populate(self._map, size, _POPULATE_WRITE)

    def reader_fd(self) -> int:
        """Return a new descriptor, mappable only for reading. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the segment. The kernel frees the memory with the last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")  # the mapping goes with its last view

    def free(self) -> None:
        """Close the segment and free the memory at once, even while readers still have it mapped.

        A reader that looks again would see zeros; the slot rules exclude such a read. MADV_REMOVE
        keeps the object's size, so no reader gets a SIGBUS.
        """
        if self.fd < 0:
            return
        try:
            self._map.madvise(mmap.MADV_REMOVE)
        except OSError as ex:  # the memory is then freed with its last mapping
            log.warning("segment not freed early: %s", ex)
        self.close()


class Mapping:
    """A peer's segment, mapped read-only. The memory is unmapped with the last view.

    `fd`: descriptor to pass on, closed with this object; -1: not kept.
    """

    def __init__(self, fd: int, size: int, keep: bool = False) -> None:
        """Map `size` bytes of `fd`, which stays the caller's. Raise OSError if the object cannot be
        mapped, or is smaller than `size`."""
        # Do not trust the peer's size: access beyond the end is a SIGBUS.
        if os.fstat(fd).st_size < size:
            raise OSError(errno.EINVAL, "segment is smaller than announced")
        self.size = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.address = _populate(self._map, size, _POPULATE_READ)
        self.fd = -1
        if keep:
            self.fd = os.dup(fd)
            weakref.finalize(self, os.close, self.fd)

    def writable(self) -> WritableMapping:
        """Map the memory once more, for a GPU's driver. Requires a kept descriptor. Raise OSError
        if the memory cannot be mapped."""
        return WritableMapping(self.fd, self.size)


class WritableMapping:
    """A second, writable mapping of a peer's segment, for as long as this object lives.

    Some drivers pin only writable memory. Only the driver uses `address`: no code writes to this
    mapping, and models see the read-only mapping.
    """

    def __init__(self, fd: int, size: int) -> None:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(again, size)
        finally:
            os.close(again)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def _create(epoch: str, size: int) -> int:
    while True:
        name = f"/{_PREFIX}{epoch}.{secrets.token_hex(8)}"
        try:
            memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError:
            continue
        except OSError as ex:
            raise ArenaExhausted("the server cannot make shared memory") from ex
        break
    fd = int(memory.fd)
    with contextlib.suppress(posix_ipc.ExistentialError):  # a `sweep` was faster
        posix_ipc.unlink_shared_memory(name)
    try:
        os.posix_fallocate(fd, 0, size)  # get ENOSPC now, not SIGBUS later
    except OSError as ex:
        os.close(fd)
        if not _shortage.logged:
            _shortage.logged = True
            log.error("no shared memory for a segment of %d bytes: %s", size, ex.strerror)
        raise ArenaExhausted("the server's shared memory is full") from ex
    _shortage.logged = False
    return fd


def _populate(memory: mmap.mmap, size: int, advice: int) -> int:
    """Fill the page tables without holding the GIL. Return the mapping's address.

    Old kernels cannot; there, first accesses fill the page tables.
    """
    array = ctypes.c_char if advice == _POPULATE_WRITE else None
    if array is not None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    else:
        import numpy as np  # for the address of a read-only mapping, which ctypes cannot give

        address = int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
    if _libc.madvise(address, size, advice) != 0:
        log.debug("page tables not populated: errno %d", ctypes.get_errno())
    return address


def sweep() -> int:
    """Remove names left by processes killed while making a segment. Return their number.

    Only regular files with shmserve's prefix and this user's uid are removed. Removing the name of
    a new segment does no harm: the living process holds the descriptor.
    """
    removed = 0
    try:
        names = [n for n in os.listdir(_DIRECTORY) if n.startswith(_PREFIX)]
    except OSError:
        return 0
    for name in names:
        path = os.path.join(_DIRECTORY, name)
        try:
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                posix_ipc.unlink_shared_memory("/" + name)
                removed += 1
        except (OSError, posix_ipc.Error):
            continue  # another process removed the name
    return removed
