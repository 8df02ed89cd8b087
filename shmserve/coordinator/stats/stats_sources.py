"""Sources of all statistics of the service."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from shmserve.coordinator.stats.counter_totals import CounterTotals
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.scheduling.rate_limiter import RateLimiter, ResourceUse
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol.control.stats_messages import Report


class StatsSources(Struct, frozen=True):
    """The coordinator's books, the counters of all processes, the GPUs, and the rate limiter."""

    reconciler: Reconciler
    book: RegionBook
    counters: CounterTotals
    gpus: GpuUse
    limiter: RateLimiter

    def report(self) -> Report:
        """Return all current numbers."""
        report = self.counters.report(self.reconciler, self.book, self.gpus.latest())
        custom, unreadable = self.counters.custom_metrics()
        return replace(
            report,
            resources=tuple(self.resources()),
            custom=tuple(custom),
            unreadable=report.unreadable + unreadable,
        )

    def resources(self) -> Iterator[ResourceUse]:
        """Yield the use of the rate limiter's resources, with names of instances."""
        linked = self.reconciler.processes
        for use in self.limiter.uses():
            holders, waiting = (
                tuple(linked[name].instance if name in linked else name for name in names)
                for names in (use.holders, use.waiting)
            )
            yield replace(use, holders=holders, waiting=waiting)
