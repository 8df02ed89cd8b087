"""What has gone wrong since the last look, in words for clients: read off the coordinator's
own books once a second, so nobody has to report anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import refused
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.stats import aggregation
from shmserve.core.stats.incidents import Incidents
from shmserve.core.stats.request_counters import Reason

Ends = Mapping[str, int]
_REQUESTS = {
    Reason.BAD_REQUEST: "request refused: it was malformed or did not fit the model",
    Reason.QUEUE_FULL: "request refused: the queue was full",
    Reason.NO_MEMORY: "request refused: the pool was used up",
    Reason.NO_EXECUTOR: "request failed: no executor was running",
    Reason.EXECUTOR_DIED: "request failed: its executor died",
    Reason.DEADLINE: "request failed: its deadline had passed",
    Reason.CANCELLED: "request cancelled: its client had gone",
    Reason.MODEL: "request failed: the model raised or returned an error",
    Reason.INTERNAL: "request failed: internal error",
}
_ROLES = {"http": "HTTP worker", "grpc": "gRPC process"}


class IncidentDetector:
    """Compares the books with before. `ends`: processes that had ended already, by role."""

    def __init__(self, ends: Ends) -> None:
        self.incidents = Incidents()
        self._ends = dict(ends)
        self._exporters: set[str] = set()  # have no counters, so `ends` does not tell of theirs
        self._failed: set[str] = set()
        self._unserved: dict[str, str] = {}
        self._quarantined = 0

    def requests(self, now: float, model: str, version: str, counts: Sequence[int]) -> None:
        """What a model version's requests came to."""
        for reason, count in zip(Reason, aggregation.failures(counts), strict=True):
            if count:
                self.incidents.add(now, f"{model}/{version}", _REQUESTS[reason], count)

    def told(self, now: float, model: str, version: str, reason: int, text: str) -> None:
        """What the client of such a request was told; an unknown reason has no entry."""
        if 0 <= reason < len(Reason):
            self.incidents.say(now, f"{model}/{version}", _REQUESTS[Reason(reason)], text)

    def look(self, now: float, reconciler: Reconciler, book: RegionBook, ends: Ends) -> None:
        self._look_at_instances(now, reconciler)
        for role, name in _ROLES.items():
            ended = ends.get(role, 0) - self._ends.get(role, 0)
            if ended > 0:
                self.incidents.add(now, name, "process ended", ended)
        self._ends = dict(ends)
        linked = reconciler.processes.values()
        exporters = {record.name for record in linked if record.role == "exporter"}
        if gone := self._exporters - exporters:
            self.incidents.add(now, "exporter", "process ended", len(gone))
        self._exporters = exporters
        unserved = {**refused(reconciler.models.by_name.values()), **reconciler.failures}
        for name, why in unserved.items():
            if self._unserved.get(name) != why:
                self.incidents.add(now, name, f"not served: {why}")
        self._unserved = unserved
        quarantined = sum(bool(region.quarantined) for region in book.regions.values())
        if quarantined > self._quarantined:
            text = "region quarantined: its object is smaller than it was when registered"
            self.incidents.add(now, "client memory", text, quarantined - self._quarantined)
        self._quarantined = quarantined

    def _look_at_instances(self, now: float, reconciler: Reconciler) -> None:
        failed = {
            name: record.reason
            for name, record in reconciler.instances.items()
            if record.state is State.FAILED and not record.left
        }
        for name, reason in failed.items():
            if name not in self._failed:
                self.incidents.add(now, name, reason)
        self._failed = set(failed)
