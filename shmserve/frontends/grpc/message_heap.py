"""Heap memory of gRPC messages whose tensors have no slots."""

from __future__ import annotations

import weakref

import numpy as np

from shmserve.errors import ShmserveError, Unavailable
from shmserve.frontends.grpc.error_statuses import details_of
from shmserve.frontends.heap_budget import BUDGET, FREE
from shmserve.frontends.http2.grpc_framing import FramingFailed, WholeMessage


class MessageHeap:
    """Bytes that one message has taken of the budget `max_heap_bytes`. `close` gives the bytes
    back."""

    __slots__ = ("_counted", "_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._counted = 0

    def take(self, nbytes: int) -> None:
        """Count `nbytes` more as kept.

        Raises:
            Unavailable: all messages together would exceed `max_heap_bytes`.
        """
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


def counted_memory(size: int, limit: int) -> memoryview:
    """Return memory of `size` bytes, counted until the memory is freed.

    Raises:
        Unavailable: as `MessageHeap.take`.
    """
    heap = MessageHeap(limit)
    heap.take(size)
    place = np.empty(size, np.uint8)
    weakref.finalize(place, heap.close).atexit = False
    return place.data


def take(heap: MessageHeap, nbytes: int) -> None:
    """Take heap, as `MessageHeap.take`, while a message is received.

    Raises:
        FramingFailed: the budget has too few bytes left.
    """
    try:
        heap.take(nbytes)
    except Unavailable as ex:
        raise failed(ex) from None


def failed(error: ShmserveError) -> FramingFailed:
    """Return an error as the end of a call whose message is being received."""
    return FramingFailed(error.grpc_status, details_of(error))
