"""Buddy allocator over one segment: powers of two, naturally aligned, lazy merging.

Freed blocks keep their size until a larger block is requested, because a server requests the same
few sizes again and again. Merging at each free would mean splitting again at the next request.
"""

MIN_BLOCK = 256  # bytes; blocks are aligned to their size, so blocks of 4 KiB and more to pages


class Buddy:
    """Allocator of blocks of ``MIN_BLOCK << order`` bytes, order 0 to `max_order`."""

    def __init__(self, size: int, max_order: int) -> None:
        self.max_order = max_order
        top = MIN_BLOCK << max_order
        if size % top:
            raise ValueError(f"size {size} is not a multiple of the largest block {top}")
        self.size = size
        self.used = 0
        self._free: list[list[int]] = [[] for _ in range(max_order + 1)]
        self._free[max_order] = list(range(size - top, -1, -top))
        self._mergeable = False

    def allocate(self, order: int) -> int | None:
        """Return the offset of a free block of the order, or None."""
        offset = self._take(order)
        if offset is None and self._mergeable:
            self._merge()
            offset = self._take(order)
        if offset is not None:
            self.used += MIN_BLOCK << order
        return offset

    def free(self, offset: int, order: int) -> None:
        """Give a block back. The caller remembers the block's order."""
        self._free[order].append(offset)
        self._mergeable = True
        self.used -= MIN_BLOCK << order

    def _take(self, order: int) -> int | None:
        for level in range(order, self.max_order + 1):
            if self._free[level]:
                offset = self._free[level].pop()
                while level > order:  # keep the lower half, put the upper one aside
                    level -= 1
                    self._free[level].append(offset + (MIN_BLOCK << level))
                return offset
        return None

    def _merge(self) -> None:
        for level in range(self.max_order):
            size = MIN_BLOCK << level
            blocks = set(self._free[level])
            alone: list[int] = []
            while blocks:
                offset = blocks.pop()
                buddy = offset ^ size
                if buddy in blocks:
                    blocks.remove(buddy)
                    self._free[level + 1].append(min(offset, buddy))
                else:
                    alone.append(offset)
            self._free[level] = alone
        self._mergeable = False
