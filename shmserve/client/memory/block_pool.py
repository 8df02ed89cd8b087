"""A client's memory that the server can open too: a pool of blocks, each one a region.

What a block is, memory of the host or of a GPU, is its `BlockKind`'s business. A block is leased
by the arrays that lie in it and by the request that uses it. It is used again only when
nobody holds it any more, and never if the server may still write to it (`taint`: a request
that nobody waited for to the end). Invariant (tests/property/test_client_memory.py): two
live leases never share a block unasked.
"""

from __future__ import annotations

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
_MAX_BLOCKS = 256  # a server's default lets a user have 1024 regions


class Block(Protocol):
    """Memory of this process, from `address` on."""

    name: str
    size: int
    address: int

    def register(self) -> None:
        """Have the server know it as the region `name`; again is no error.

        Raises:
            ShmserveError: it was refused, or nobody is there.
        """

    def window(self, offset: int, nbytes: int) -> tuple[Any, object]:
        """A part of it as an array of bytes, and what lives as long as that array or any
        view of it. The memory lives as long, too."""

    def close(self) -> None:
        """Let go of it; the memory goes with the last array in it."""


class BlockKind(Protocol):
    """What blocks of one pool have in common."""

    def size_of(self, nbytes: int) -> int:
        """The size of block for so many bytes."""

    def make(self, name: str, size: int) -> Block:
        """A new one. Raises OSError where there is no such memory."""

    def unregister(self, names: list[str]) -> None:
        """Have the server forget regions; raises as `Block.register`."""

    def address_of(self, array: Any) -> int:
        """Where an array begins that is known to be of this kind of memory."""


class _ArrayLease(weakref.ref[Any]):
    """An array's lease; `weakref.finalize` does more, and takes as long as the rest of a call."""

    __slots__ = ("block",)

    block: Block


class BlockPool:
    """All blocks of one client. Thread-safe."""

    def __init__(self, kind: BlockKind, max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._prefix = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # the same, sorted
        self._leases: dict[str, int] = {}  # by name
        self._tainted: set[str] = set()  # names
        self._spoilt: deque[Block] = deque()  # that are to be among them
        self._free: dict[int, list[Block]] = {}  # by size
        self._released: deque[Block] = deque()  # appended to by arrays' ends, at any moment
        self._arrays: dict[int, _ArrayLease] = {}  # of arrays, by their ids: arrays have no hash
        self._count = 0
        self._closed = False
        self.total_bytes = 0

    # -------------------------------------------------------------------- leases

    def acquire(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, leased once; None: there is no room, or no server."""
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
        """End a lease. Any thread, any moment."""
        self._released.append(block)

    def array(self, block: Block, offset: int, nbytes: int) -> Any:
        """Bytes that hold a lease of their own for as long as they, or views, are referenced."""
        array, alive = block.window(offset, nbytes)
        with self._lock:
            if block.name in self._leases:
                self._leases[block.name] += 1
        lease = _ArrayLease(alive, self._ended)
        lease.block = block
        self._arrays[id(lease)] = lease
        return array

    def _ended(self, lease: _ArrayLease) -> None:
        """The array has gone. Any thread, any moment."""
        self._released.append(lease.block)
        self._arrays.pop(id(lease), None)

    def taint(self, blocks: Iterable[Block]) -> None:
        """The server may still use these: they are given up with their last lease. Any thread, any
        moment, before that lease ends."""
        self._spoilt.extend(blocks)

    def find(self, array: Any) -> tuple[Block, int] | None:
        """The block that an array lies in as a whole, and where; None: elsewhere."""
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
        """A server that was started anew knows none of the regions; False: nor will it."""
        with self._lock:
            self._settle()
            try:
                for block in self._blocks.values():
                    block.register()
            except ShmserveError:
                return False
        return True

    def close(self, unregister: bool = True) -> None:
        """Give everything up; arrays that are still referenced stay readable."""
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
        except ResourceExhausted:  # of a quota that our own unused blocks may count towards
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
        """Give up unused blocks, at least `nbytes` if there are so many."""
        unused: list[Block] = []
        freed = 0
        for free in self._free.values():
            while free and freed < nbytes:
                unused.append(free.pop(0))
                freed += unused[-1].size
        self._discard(unused)
        return freed

    def _settle(self) -> None:
        """End the leases that were released."""
        spoilt = []
        while self._released:
            block = self._released.popleft()
            while self._spoilt:  # what was tainted before this lease was ended, at the least
                name = self._spoilt.popleft().name
                if name in self._leases:
                    self._tainted.add(name)
            leases = self._leases.pop(block.name, 0) - 1
            if leases > 0:
                self._leases[block.name] = leases
            elif block.name in self._tainted:
                spoilt.append(block)
            elif leases == 0:  # less: it was given up meanwhile
                self._free.setdefault(block.size, []).append(block)
        self._discard(spoilt)

    def _discard(self, blocks: list[Block], unregister: bool = True) -> None:
        """Give these up. First of all at the server, which has them open."""
        for block in blocks:
            del self._blocks[block.address]
            self._addresses.remove(block.address)
            self._leases.pop(block.name, None)
            self._tainted.discard(block.name)
            self.total_bytes -= block.size
        if blocks and unregister:
            with contextlib.suppress(ShmserveError):  # then it is gone, or this process soon is
                self._kind.unregister([block.name for block in blocks])
        for block in blocks:
            block.close()


def size_class(nbytes: int) -> int:
    """The size of block for so many bytes: quarter steps between powers of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
