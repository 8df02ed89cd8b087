"""Turns of a load: distribution of a run's requests to the callers."""

import itertools
import threading
from collections.abc import Iterator


class Turns:
    """Distributor of a run's requests to the callers. Thread-safe.

    Args:
        planned: moments at which requests should start, in seconds from the start of the measured
            time; None: at once, whenever a caller is free.
        seconds: length of the measured time.
        requests: largest number of requests that start in the measured time.
    """

    def __init__(self, planned: Iterator[float] | None, seconds: float, requests: int) -> None:
        self._planned, self._seconds, self._left = planned, seconds, requests
        self._lock = threading.Lock()

    def take(self, now: float) -> float | None:
        """Return the moment at which the caller's next request should start, negative during the
        warm-up; None: the run is over."""
        with self._lock:
            if now > self._seconds or not self._left:
                return None
            due = now if self._planned is None else next(self._planned)
            if due > self._seconds:
                return None
            self._left -= due >= 0
            return due

    def unsent(self) -> int:
        """Return the number of planned requests that will not start, once the run is over."""
        rest = itertools.islice(self._planned or (), self._left)
        return sum(1 for _ in itertools.takewhile(self._seconds.__ge__, rest))

    def end(self) -> None:
        """Give no further turn."""
        with self._lock:
            self._left = 0
