"""What request bodies take of a process's heap, where they cannot go straight into slots.

JSON, and what was compressed or came in chunks without a size beforehand, is gathered on the heap,
and decoding JSON takes many times its size.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import TooLarge
from shmserve.frontends.heap_budget import HeapBudget

JSON_COST = 16  # numbers as Python objects, over their text of two bytes each
RAW_COST = 2  # the bytes, and a copy in another form

_LEASE = "shmserve.heap"


class _Lease:
    """What one request has taken. It lies in the request's environment and ends with it, which is
    on every path, and after the last of the body was looked at."""

    def __init__(self, budget: HeapBudget) -> None:
        self._budget = budget
        self._nbytes = 0

    def take(self, nbytes: int, most: int) -> None:
        if self._nbytes + nbytes > most:
            raise TooLarge(
                f"this request's body would take more than {most} bytes of memory"
                " (setting max_heap_bytes)"
            )
        self._budget.take(nbytes, most)
        self._nbytes += nbytes

    def __del__(self) -> None:
        self._budget.give_back(self._nbytes)


class BodyHeap(Struct, frozen=True):
    """The heap as the body of one request has it."""

    environ: dict[str, Any]
    limits: Settings
    budget: HeapBudget

    def take(self, nbytes: int) -> None:
        """Before so many bytes more are kept.

        Raises:
            TooLarge: this request alone takes more than `max_heap_bytes`.
            Unavailable: it does together with all others.
        """
        lease = self.environ.get(_LEASE)
        if lease is None:
            lease = self.environ[_LEASE] = _Lease(self.budget)
        lease.take(nbytes, self.limits.max_heap_bytes)
