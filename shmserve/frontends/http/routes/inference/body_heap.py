"""Heap memory of request bodies that cannot go straight into slots.

JSON, compressed bodies and chunked bodies of unknown size are gathered on the process's heap.
Decoding JSON takes many times its size.
"""

from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import TooLarge
from shmserve.frontends.heap_budget import HeapBudget

JSON_COST = 16  # heap bytes per byte of JSON: a number of two characters becomes a Python object
RAW_COST = 2  # the bytes, and a copy in another form

_LEASE = "shmserve.heap"


class _Lease:
    """Heap bytes taken by one request. The lease lies in the request's environ. So the bytes are
    given back on every path, after the last use of the body."""

    def __init__(self, budget: HeapBudget) -> None:
        self._budget = budget
        self._nbytes = 0

    def take(self, nbytes: int, limit: int) -> None:
        if self._nbytes + nbytes > limit:
            raise TooLarge(
                f"this request's body would take more than {limit} bytes of memory"
                " (setting max_heap_bytes)"
            )
        self._budget.take(nbytes, limit)
        self._nbytes += nbytes

    def __del__(self) -> None:
        self._budget.give_back(self._nbytes)


class BodyHeap(Struct, frozen=True):
    """Heap account of one request's body."""

    environ: dict[str, Any]
    limits: Settings
    budget: HeapBudget

    def take(self, nbytes: int) -> None:
        """Charge `nbytes`, before more of the body is kept. Raise TooLarge if this request alone
        takes more than `max_heap_bytes`. Raise Unavailable if all requests of the process together
        take more than `max_heap_bytes`."""
        lease = self.environ.get(_LEASE)
        if lease is None:
            lease = self.environ[_LEASE] = _Lease(self.budget)
        lease.take(nbytes, self.limits.max_heap_bytes)
