"""Pool of blocks: client memory that the server can open, each block one region.

A `BlockKind` makes the blocks, of host memory or of a GPU's. The arrays in a block and the request
that uses the block hold leases. A block is used again only after its last lease has ended, and
never if the server may still write there (`taint`: the client gave up waiting for the request).
Invariant (tests/property/test_client_memory.py): two live leases share a block only on purpose.
"""

import bisect
import contextlib
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from shmserve.errors import ResourceExhausted, ShmserveError

_SMALLEST = 16 * 1024
_MAX_BLOCKS = 256  # a quarter of the server's default limit of regions per user


class Block(Protocol):
    """Memory of this process, starting at `address`."""

    name: str
    size: int
    address: int

    def register(self) -> None:
        """Register the block at the server as region `name`. Registering again is no error. Raise
        ShmserveError if the server refused or does not answer."""

    def window(self, offset: int, nbytes: int) -> tuple[Any, object]:
        """Return a part of the block as an array of bytes, and an object that lives as long as the
        array or any view. The memory stays valid for that time."""

    def close(self) -> None:
        """Give up the block; its memory is freed with the last array there."""


class BlockKind(Protocol):
    """Kind of memory: makes and unregisters the blocks of one pool."""

    def size_of(self, nbytes: int) -> int:
        """Return the size of a block for `nbytes` bytes."""

    def make(self, name: str, size: int) -> Block:
        """Return a new block. Raise OSError if no such memory is available."""

    def unregister(self, names: list[str]) -> None:
        """Unregister regions at the server; raises as `Block.register`."""

    def address_of(self, array: Any) -> int:
        """Return the start address of an array in this kind of memory."""


class _ArrayLease(weakref.ref[Any]):
    """Lease of an array. `weakref.finalize` would do, but takes as long as the rest of a call."""

    __slots__ = ("block",)

    block: Block


class BlockPool:
    """All blocks of one kind of memory of a client. Thread-safe."""

    def __init__(self, kind: BlockKind, max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._prefix = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # keys of `_blocks`, sorted
        self._leases: dict[str, int] = {}  # number of leases, by block name
        self._tainted: set[str] = set()  # block names
        self._spoilt: deque[Block] = deque()  # blocks to add to `_tainted`
        self._free: dict[int, list[Block]] = {}  # unused blocks, by size
        # ended leases; weak reference callbacks append at any moment
        self._released: deque[Block] = deque()
        self._arrays: dict[int, _ArrayLease] = {}  # by lease id, because arrays are not hashable
        self._count = 0
        self._closed = False
        self.total_bytes = 0

    # -------------------------------------------------------------------- leases

    def acquire(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes` with one lease; None without room or server."""
        size = self._kind.size_of(nbytes)
        with self._lock:
            self._settle()
            if self._closed:
                return None
            free = self._free.get(size)
            block = free.pop() if free else self._new_block(size)
            if block is not None:
                self._leases[block.name] = 1
            return block

    def release(self, block: Block) -> None:
        """End a lease. Callable from any thread at any moment."""
        self._released.append(block)

    def array(self, block: Block, offset: int, nbytes: int) -> Any:
        """Return bytes of a block as an array with its own lease, which ends with the last
        reference to the array or a view."""
        array, alive = block.window(offset, nbytes)
        with self._lock:
            if block.name in self._leases:
                self._leases[block.name] += 1
        lease = _ArrayLease(alive, self._ended)
        lease.block = block
        self._arrays[id(lease)] = lease
        return array

    def _ended(self, lease: _ArrayLease) -> None:
        """End the lease of an array that was freed. Runs in any thread at any moment."""
        self._released.append(lease.block)
        self._arrays.pop(id(lease), None)

    def taint(self, blocks: Iterable[Block]) -> None:
        """Mark blocks that the server may still use, to be given up with the last lease. Callable
        from any thread at any moment before this lease ends."""
        self._spoilt.extend(blocks)

    def find(self, array: Any) -> tuple[Block, int] | None:
        """Return the block that contains an array, and the array's offset there. Return None if no
        single block contains the whole array."""
        if not array.flags.c_contiguous or not array.nbytes:
            return None
        address = self._kind.address_of(array)
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            block = self._blocks[self._addresses[index]] if index >= 0 else None
        if block is None or address + array.nbytes > block.address + block.size:
            return None
        return block, address - block.address

    # ---------------------------------------------------------------------- life

    def register_again(self) -> bool:
        """Register all blocks at a restarted server. Return False on refusal or silence."""
        with self._lock:
            self._settle()
            try:
                for block in self._blocks.values():
                    block.register()
            except ShmserveError:
                return False
        return True

    def close(self, unregister: bool = True) -> None:
        """Give up all blocks; arrays that are still referenced stay readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._discard(list(self._blocks.values()), unregister)

    def _new_block(self, size: int) -> Block | None:
        if not self._make_room(size):
            return None
        self._count += 1
        try:
            block = self._kind.make(f"{self._prefix}-{self._count}", size)
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
            block.register()
        # this client's unused blocks may count towards the exceeded quota
        except ResourceExhausted:
            if not self._evict(self.total_bytes):
                raise
            block.register()

    def _make_room(self, size: int) -> bool:
        if self.total_bytes + size > self._max_bytes:
            self._evict(self.total_bytes + size - self._max_bytes)
        if len(self._blocks) >= _MAX_BLOCKS:
            self._evict(1)
        return self.total_bytes + size <= self._max_bytes and len(self._blocks) < _MAX_BLOCKS

    def _evict(self, nbytes: int) -> int:
        """Give up unused blocks of at least `nbytes` bytes, or all. Return the bytes freed."""
        unused: list[Block] = []
        freed = 0
        for free in self._free.values():
            while free and freed < nbytes:
                unused.append(free.pop(0))
                freed += unused[-1].size
        self._discard(unused)
        return freed

    def _settle(self) -> None:
        """Process the ended leases."""
        spoilt = []
        while self._released:
            block = self._released.popleft()
            while self._spoilt:  # covers at least all taints from before this lease ended
                name = self._spoilt.popleft().name
                if name in self._leases:
                    self._tainted.add(name)
            leases = self._leases.pop(block.name, 0) - 1
            if leases > 0:
                self._leases[block.name] = leases
            elif block.name in self._tainted:
                spoilt.append(block)
            elif leases == 0:  # negative: the block was given up meanwhile
                self._free.setdefault(block.size, []).append(block)
        self._discard(spoilt)

    def _discard(self, blocks: list[Block], unregister: bool = True) -> None:
        """Give up blocks, first at the server, which has the memory open."""
        for block in blocks:
            del self._blocks[block.address]
            self._addresses.remove(block.address)
            self._leases.pop(block.name, None)
            self._tainted.discard(block.name)
            self.total_bytes -= block.size
        if blocks and unregister:
            # the server is gone, or its cleanup follows when this process ends
            with contextlib.suppress(ShmserveError):
                self._kind.unregister([block.name for block in blocks])
        for block in blocks:
            block.close()


def size_class(nbytes: int) -> int:
    """Return the block size for `nbytes` bytes: quarter steps between powers of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
