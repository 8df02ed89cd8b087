"""Heap budget of a process, shared by all messages that cannot be received straight into slots."""

import threading

from shmserve.errors import Unavailable
from shmserve.observe import flight_recorder

# bytes of each message that are not counted; limits of connections and calls bound the sum
FREE = 1 << 20


class HeapBudget:
    """Bytes of heap that all requests of a process have taken."""

    def __init__(self) -> None:
        # reentrant: garbage collection may end a lease while the lock is held
        self._lock = threading.RLock()
        self.used = 0

    def take(self, nbytes: int, most: int) -> None:
        """Count `nbytes` as taken. Raise Unavailable if more than `most` bytes would be taken."""
        with self._lock:
            if self.used + nbytes > most:
                flight_recorder.record("limit reached", "memory of bodies", "max_heap_bytes")
                raise Unavailable(
                    "there is no memory for this request's body now: other requests have it"
                    " (setting max_heap_bytes)"
                )
            self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        with self._lock:
            self.used -= nbytes


BUDGET = HeapBudget()  # of this process
