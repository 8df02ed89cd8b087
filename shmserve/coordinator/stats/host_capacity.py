"""Host capacity: computes the free share of this host from the processes' counter pages."""

from __future__ import annotations

from collections import Counter

from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.coordinator.stats.monitoring import in_flight
from shmserve.coordinator.stats.stats_sources import StatsSources
from shmserve.core.control import free_capacity
from shmserve.core.control.free_capacity import ModelLoad
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.registry import Snapshot

Model = tuple[str, str]


def free_percent(sources: StatsSources, snapshot: Snapshot | None) -> int:
    """Return the host's weight, from 1 to 100 percent. Return 0 while the service is not ready, so
    that no requests are sent."""
    if snapshot is None or not snapshot.ready:
        return 0
    readings = sources.counters.readings()
    # caches are evicted for requests
    taken = sum(r.gauges.slot_bytes - r.gauges.cache_bytes for r in readings)
    loads = _loads(sources.reconciler, _waiting(readings))
    return free_capacity.percent(loads, taken, sources.reconciler.ledger.pool_bytes)


def _waiting(readings: list[CounterReading]) -> Counter[Model]:
    """Return the requests waiting for an instance, by model version. Frontends publish in-flight
    requests once a second. An executor publishes read requests at once, but reads nothing while
    executing."""
    running: Counter[Model] = Counter()
    read: Counter[Model] = Counter()
    for reading in readings:
        if reading.runs is not None:
            model = reading.owner.model, reading.owner.version
            running[model] += reading.running
            read[model] += max(0, reading.depth - reading.running)
    sent = Counter({model: n - running[model] for model, n in in_flight(readings).items()})
    return read | sent


def _loads(reconciler: Reconciler, waiting: Counter[Model]) -> list[ModelLoad]:
    serving = (record.serving for record in reconciler.models.by_name.values())
    return [
        ModelLoad(
            sum(not i.left for i in version.instances),
            sum(i.live for i in version.instances),
            waiting[version.spec.name, version.spec.version],
        )
        for revision in serving
        if revision is not None
        for version in revision.versions
    ]
