"""Heap memory of gRPC messages whose tensors have no slots."""

import mmap
import weakref

from shmserve.errors import ShmserveError, Unavailable
from shmserve.frontends.grpc.error_statuses import details_of
from shmserve.frontends.heap_budget import BUDGET, FREE
from shmserve.frontends.http2.grpc_framing import FramingFailed, WholeMessage

_FIRST_BYTES = 1 << 17


class MessageHeap:
    """Bytes that a message has taken of the budget `max_heap_bytes`. `close` gives them back."""

    __slots__ = ("_counted", "_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._counted = 0

    def take(self, nbytes: int) -> None:
        """Count `nbytes` more as kept. Raise Unavailable if all would exceed `max_heap_bytes`."""
        self._used += nbytes
        more = self._used - FREE - self._counted
        if more > 0:
            BUDGET.take(more, self._limit)
            self._counted += more

    def close(self) -> None:
        """Give the bytes back. Idempotent."""
        counted, self._counted, self._used = self._counted, 0, 0
        if counted:
            BUDGET.give_back(counted)


class CountedMessage(WholeMessage):
    """A message in one piece of memory, counted while received and until the memory is freed."""

    __slots__ = ("_heap",)

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size)
        self._heap = MessageHeap(limit)
        weakref.finalize(self.space().obj, self._heap.close).atexit = False

    def filled(self, count: int) -> None:
        take(self._heap, count)
        super().filled(count)

    def feed(self, data: memoryview) -> None:
        take(self._heap, len(data))
        super().feed(data)


class GrowingMemory:
    """Memory for a message of unknown size, counted as bytes are added.

    The memory is a mapping of its own: unlike heap, a mapping returns to the system as soon as the
    mapping is freed, and grows without a copy.

    `size`: bytes added so far.
    """

    __slots__ = ("_heap", "_mapping", "size")

    def __init__(self, limit: int) -> None:
        self._heap = MessageHeap(limit)
        self._mapping = mmap.mmap(-1, _FIRST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = 0

    def add(self, part: bytes) -> None:
        """Add bytes at the end. Raise Unavailable as `MessageHeap.take` does."""
        self._heap.take(len(part))
        end = self.size + len(part)
        if end > len(self._mapping):
            self._mapping.resize(2 * end)  # pages are allocated as bytes arrive
        self._mapping[self.size : end] = part
        self.size = end

    def view(self) -> memoryview:
        """Return all bytes, counted until the memory is freed. Call once, instead of `close`."""
        weakref.finalize(self._mapping, self._heap.close).atexit = False
        return memoryview(self._mapping)[: self.size]

    def close(self) -> None:
        """Free the memory, even while an error's traceback refers to this object."""
        self._mapping.close()
        self._heap.close()


def take(heap: MessageHeap, nbytes: int) -> None:
    """Take heap, as `MessageHeap.take`, while a message is received. Raise FramingFailed if the
    budget has too few bytes left."""
    try:
        heap.take(nbytes)
    except Unavailable as ex:
        raise failed(ex) from None


def failed(error: ShmserveError) -> FramingFailed:
    """Return an error as the end of a call whose message is being received."""
    return FramingFailed(error.grpc_status, details_of(error))
