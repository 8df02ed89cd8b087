"""What callers have of the pool through this process, and how much one of them may.

Callers are those that `core.scheduling.caller_number` numbers. While a request is small it is not
counted: `FREE` bytes are nobody's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from shmserve.config import Settings
from shmserve.errors import ResourceExhausted, TooLarge
from shmserve.observe import flight_recorder

FREE = 128 << 10  # of each request; the limits of connections and calls bound these


class CallerShares:
    """One per frontend process, for any thread.

    Of the pool one caller may have `max_caller_share`, and through each frontend process an equal
    part of that, so that no process has to ask another. One request alone may have all of it: else
    many processes would mean small tensors.

    Args:
        settings: `max_caller_share`, and how many frontend processes there are.
        pool_bytes: how large the pool is; 0: that is not known yet, and nobody is refused.
    """

    def __init__(self, settings: Settings, pool_bytes: Callable[[], int]) -> None:
        self._share = settings.max_caller_share
        self._processes = settings.http_workers + settings.grpc_processes
        self._pool_bytes = pool_bytes
        self._lock = threading.Lock()
        self.held: Counter[int] = Counter()  # by caller; none of them is 0

    def of(self, caller: int) -> CallerShare:
        """What a new request of this caller has: nothing yet. Close it on every path."""
        return CallerShare(self, caller)

    def change(self, caller: int, before: int, after: int) -> None:
        """One request of a caller has other bytes than before.

        Raises:
            ResourceExhausted: it is more than the caller may have now.
            TooLarge: it is more than one request may ever have.
        """
        with self._lock:
            others = self.held[caller] - before
            if after > before:
                self._check(others, after)
            self.held[caller] = others + after
            if not self.held[caller]:
                del self.held[caller]

    def _check(self, others: int, wanted: int) -> None:
        pool = self._pool_bytes()
        alone = int(pool * self._share)
        if pool and wanted > alone:
            limit = (
                f"one caller may have {alone} of the pool (settings pool_bytes, max_caller_share)"
            )
            if wanted > pool:
                limit = f"the whole pool has {pool} (setting pool_bytes)"
            raise TooLarge(f"this request's tensors have {wanted} bytes: {limit}")
        if not alone or self._share == 1:
            return
        most = alone // self._processes if others else alone
        if others + wanted > most:
            flight_recorder.record("limit reached", "tensors of one caller", "max_caller_share")
            raise ResourceExhausted(
                f"this request's tensors have {wanted} bytes, those of its caller's other requests"
                f" {others}: one caller may have {most} of the pool here (settings pool_bytes,"
                " max_caller_share)"
            )


class CallerShare:
    """What one request has of the pool, of its caller's share. Not for two threads at a time."""

    __slots__ = ("_caller", "_nbytes", "_shares")

    def __init__(self, shares: CallerShares, caller: int) -> None:
        self._shares = shares
        self._caller = caller
        self._nbytes = 0

    def hold(self, nbytes: int) -> None:
        """From now on it has so many bytes in all.

        Raises:
            ResourceExhausted, TooLarge: as `CallerShares.change`; it has what it had.
        """
        self._shares.change(self._caller, self._nbytes, nbytes)
        self._nbytes = nbytes

    def close(self) -> None:
        """It has nothing any more. Idempotent."""
        if self._nbytes:
            self.hold(0)
