"""What messages take of a process's heap, where they cannot go straight into slots.

All requests of a process share one budget for that.
"""

from __future__ import annotations

import threading

from shmserve.errors import Unavailable
from shmserve.observe import flight_recorder

FREE = 1 << 20  # of each message; the limits of connections and calls bound these


class HeapBudget:
    """The bytes that all requests of a process have taken."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a lease may end wherever Python collects garbage
        self.used = 0

    def take(self, nbytes: int, most: int) -> None:
        """Count them.

        Raises:
            Unavailable: with these it were more than `most`.
        """
        with self._lock:
            if self.used + nbytes > most:
                flight_recorder.record("limit reached", "memory of bodies", "max_heap_bytes")
                raise Unavailable(
                    "there is no memory for this request's body now: other requests have it"
                    " (setting max_heap_bytes)"
                )
            self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count them no more."""
        with self._lock:
            self.used -= nbytes


BUDGET = HeapBudget()  # this process's
