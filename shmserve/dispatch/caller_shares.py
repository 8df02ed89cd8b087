"""Caller shares: bytes of the pool that each caller holds through this process, and the limit for
one caller.

`core.caller` numbers the callers. Requests of at most `FREE` bytes are not counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from shmserve.config import Settings
from shmserve.errors import ResourceExhausted, TooLarge
from shmserve.observe import flight_recorder

FREE = 128 << 10  # requests up to this size hold no share; connections and calls are limited


class CallerShares:
    """Shares of all callers in one frontend process. Thread-safe.

    One caller may hold `max_caller_share` of the pool, and through each frontend process an equal
    part of this limit, so no process has to ask another. A caller's only request may hold the
    whole limit; otherwise many processes would mean small tensors.

    `settings`: `max_caller_share`, and the number of frontend processes. `pool_bytes`: returns the
    pool's size in bytes; 0 if not known yet, when no request is refused.
    """

    def __init__(self, settings: Settings, pool_bytes: Callable[[], int]) -> None:
        self._share = settings.max_caller_share
        self._processes = settings.http_workers + settings.grpc_processes
        self._pool_bytes = pool_bytes
        self._lock = threading.Lock()
        self.held: Counter[int] = Counter()  # bytes by caller, without zeros

    @property
    def beside(self) -> int:
        """Bytes that several requests of one caller may hold together, if the pool's size is
        known; else a very large number."""
        return int(self._pool_bytes() * self._share) // self._processes or 1 << 62

    def of(self, caller: int) -> CallerShare:
        """Return an empty share for a new request of a caller. Close the share on every path."""
        return CallerShare(self, caller)

    def change(self, caller: int, before: int, after: int) -> None:
        """Change the bytes that a caller's request holds from `before` to `after`. Raise
        ResourceExhausted if the caller's requests would hold more than the caller may have now.
        Raise TooLarge if the request alone would exceed the limit."""
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
        most = self.beside if others else alone
        if others + wanted > most:
            flight_recorder.record("limit reached", "tensors of one caller", "max_caller_share")
            raise ResourceExhausted(
                f"this request's tensors have {wanted} bytes, those of its caller's other requests"
                f" {others}: one caller may have {most} of the pool here (settings pool_bytes,"
                " max_caller_share)"
            )


class CallerShare:
    """Bytes of the pool held by one request, counted for its caller. Not for two threads at a
    time."""

    __slots__ = ("_caller", "_nbytes", "_shares")

    def __init__(self, shares: CallerShares, caller: int) -> None:
        self._shares = shares
        self._caller = caller
        self._nbytes = 0

    def hold(self, nbytes: int) -> None:
        """Set the total bytes held by the request."""
        self._shares.change(self._caller, self._nbytes, nbytes)
        self._nbytes = nbytes

    def close(self) -> None:
        """Release all bytes. Idempotent."""
        if self._nbytes:
            self.hold(0)
