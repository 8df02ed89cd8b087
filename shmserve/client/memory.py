"""The client's shared memory: blocks, each one sealed memfd that the server knows as a region.

A block is leased by the arrays that lie in it and by the request that uses it. It is used
again only when nobody holds it any more, and never if the server may still write to it
(`taint`: a request that nobody waited for to the end). Invariant
(tests/property/test_client_memory.py): two live leases never share a block unasked.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from shmserve.errors import ResourceExhausted, ShmserveError

Array = np.ndarray[Any, Any]

_SMALLEST = 16 * 1024
_MAX_BLOCKS = 256  # a server's default lets a user have 1024 regions
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Registers(Protocol):
    """What this needs of `control.Control`."""

    def register(self, name: str, byte_size: int, fd: int) -> None: ...

    def unregister(self, names: list[str]) -> None: ...


class Block:
    """One memfd, mapped. `leases` is the pool's."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.leases = 0
        self.tainted = False
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)  # out of memory: here, and as an error
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self.address: int = self.window(0, size).__array_interface__["data"][0]

    def window(self, offset: int, nbytes: int) -> Array:
        """A window; the mapping lives as long as any array in it."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Give up the descriptor; the memory goes with its last mapping anywhere."""
        os.close(self.fd)


class Memory:
    """All blocks of one client. Thread-safe."""

    def __init__(self, control: Registers, max_bytes: int) -> None:
        self._control = control
        self._max_bytes = max_bytes
        self._prefix = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # the same, sorted
        self._free: dict[int, list[Block]] = {}  # by size
        self._let_go: deque[Block] = deque()  # appended to by finalizers, at any moment
        self._count = 0
        self._closed = False
        self.total_bytes = 0

    # -------------------------------------------------------------------- leases

    def acquire(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, leased once; None: there is no room, or no server."""
        size = size_class(nbytes)
        with self._lock:
            self._settle()
            if self._closed:
                return None
            free = self._free.get(size)
            block = free.pop() if free else self._made(size)
            if block is not None:
                block.leases = 1
            return block

    def release(self, block: Block) -> None:
        """End a lease. Any thread, any moment."""
        self._let_go.append(block)

    def array(self, block: Block, offset: int, nbytes: int) -> Array:
        """Bytes that hold a lease of their own for as long as they, or views, are referenced."""
        array = block.window(offset, nbytes)
        with self._lock:
            block.leases += 1
        weakref.finalize(array, self._let_go.append, block).atexit = False
        return array

    def taint(self, blocks: Iterable[Block]) -> None:
        """The server may still use these: they are given up with their last lease."""
        for block in blocks:
            block.tainted = True

    def find(self, array: Array) -> tuple[Block, int] | None:
        """The block that an array lies in as a whole, and where; None: elsewhere."""
        if not array.flags.c_contiguous or not array.nbytes:
            return None
        address: int = array.__array_interface__["data"][0]
        with self._lock:
            at = bisect.bisect_right(self._addresses, address) - 1
            block = self._blocks[self._addresses[at]] if at >= 0 else None
        if block is None or address + array.nbytes > block.address + block.size:
            return None
        return block, address - block.address

    # ---------------------------------------------------------------------- life

    def register_again(self) -> bool:
        """A server that was started anew knows none of the regions; False: nor will it."""
        with self._lock:
            self._settle()
            try:
                for block in self._blocks.values():
                    self._control.register(block.name, block.size, block.fd)
            except ShmserveError:
                return False
        return True

    def close(self, unregister: bool = True) -> None:
        """Give everything up; arrays that are still referenced stay readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            blocks = list(self._blocks.values())
            self._forget(blocks)
            if unregister:
                self._unregister(blocks)

    # -------------------------------------------------------------------- inside

    def _made(self, size: int) -> Block | None:
        if not self._make_room(size):
            return None
        self._count += 1
        try:
            block = Block(f"{self._prefix}-{self._count}", size)
        except OSError:
            return None
        try:
            self._register(block)
        except ShmserveError:
            block.close()
            return None
        self._blocks[block.address] = block
        bisect.insort(self._addresses, block.address)
        self.total_bytes += size
        return block

    def _register(self, block: Block) -> None:
        try:
            self._control.register(block.name, block.size, block.fd)
        except ResourceExhausted:  # of a quota that our own unused blocks may count towards
            if not self._evict(self.total_bytes):
                raise
            self._control.register(block.name, block.size, block.fd)

    def _make_room(self, size: int) -> bool:
        if self.total_bytes + size > self._max_bytes:
            self._evict(self.total_bytes + size - self._max_bytes)
        if len(self._blocks) >= _MAX_BLOCKS:
            self._evict(1)
        return self.total_bytes + size <= self._max_bytes and len(self._blocks) < _MAX_BLOCKS

    def _evict(self, nbytes: int) -> int:
        """Give up unused blocks, at least `nbytes` if there are so many."""
        gone: list[Block] = []
        freed = 0
        for free in self._free.values():
            while free and freed < nbytes:
                gone.append(free.pop(0))
                freed += gone[-1].size
        self._forget(gone)
        self._unregister(gone)
        return freed

    def _settle(self) -> None:
        """Take back what finalizers have let go."""
        gone = []
        while self._let_go:
            block = self._let_go.popleft()
            block.leases -= 1
            if block.leases or block.address not in self._blocks:
                continue
            if block.tainted:
                gone.append(block)
            else:
                self._free.setdefault(block.size, []).append(block)
        self._forget(gone)
        self._unregister(gone)

    def _forget(self, blocks: list[Block]) -> None:
        for block in blocks:
            del self._blocks[block.address]
            self._addresses.remove(block.address)
            self.total_bytes -= block.size
            block.close()

    def _unregister(self, blocks: list[Block]) -> None:
        if not blocks:
            return
        try:
            self._control.unregister([block.name for block in blocks])
        except ShmserveError:
            return  # the server is gone, and its regions with it, or this process soon is


def size_class(nbytes: int) -> int:
    """The size of block for so many bytes: quarter steps between powers of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
