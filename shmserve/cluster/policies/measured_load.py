"""Measured load: wait of requests and demand of models, computed from the nodes' counts. Counts
only grow, so the difference of two looks is the load between."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

SMOOTH_S = 10.0  # time constant of averaged demand, in seconds
STEADY_S = 60.0  # time constant of steady demand, for decisions that are costly to follow
FEWEST = 50  # requests before a replica's speed counts as known, because execution times vary
MOST = 500  # most recent requests that the speed is computed from
RUNS = 2.0  # in mean executions: a replica without an ended request for longer counts as idle

Replica = tuple[str, str]  # node, model
Seconds = Annotated[float, Meta(ge=0, le=1e15)]  # not NaN, which no comparison would notice


@dataclass(frozen=True)
class ReplicaCounts:
    """Counts of a model on a node since the service started. `requests`: number of executed
    requests. `waited_s`: seconds that requests waited for an executor, summed. `busy_s`: seconds
    that requests kept an executor busy, summed."""

    requests: Annotated[int, Meta(ge=0)] = 0
    waited_s: Seconds = 0.0
    busy_s: Seconds = 0.0

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """Return the growth since `before`. If the service has restarted, return all counts."""
        if self.requests < before.requests:
            return self
        return ReplicaCounts(
            self.requests - before.requests,
            max(0.0, self.waited_s - before.waited_s),
            max(0.0, self.busy_s - before.busy_s),
        )


@dataclass(frozen=True)
class NodeLook:
    """State of a node's models.

    Attributes:
        room: memory for models, in bytes.
        held: models that take memory.
        ready: models that serve.
        failed: models that could not be loaded, with the reasons.
    """

    room: Annotated[int, Meta(ge=0)]
    held: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, ReplicaCounts] = field(default_factory=dict)


class MeasuredLoad:
    """Load of all replicas from look to look."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._counts: dict[Replica, ReplicaCounts] = {}
        self._recent: dict[Replica, ReplicaCounts] = {}  # counts of about the last MOST requests
        # time of the last look in which requests ended, and the mean wait of those
        self._last: dict[Replica, tuple[float, float]] = {}
        self._waits: dict[str, list[float]] = {}
        self._demand: dict[str, float] = {}
        self._steady: dict[str, float] = {}

    def take(self, now: float, looks: Mapping[str, NodeLook]) -> None:
        counts = {
            (node, name): count
            for node, look in looks.items()
            for name, count in look.counts.items()
        }
        changes = {
            replica: count.since(self._counts[replica])
            for replica, count in counts.items()
            if replica in self._counts
        }
        self._counts = counts
        self._recent = {
            replica: _recent(self._recent.get(replica, ReplicaCounts()), change)
            for replica, change in changes.items()
        }
        self._sum_up(now, changes)

    def _sum_up(self, now: float, changes: Mapping[Replica, ReplicaCounts]) -> None:
        passed = now - self._at if self._at is not None else 0.0
        self._at = now
        waits: dict[str, list[float]] = defaultdict(list)
        busy: dict[str, float] = defaultdict(float)
        for replica, change in changes.items():
            if change.requests:
                self._last[replica] = (now, change.waited_s / change.requests)
            waits[replica[1]].append(self._wait_s(now, replica))
            busy[replica[1]] += change.busy_s
        self._last = {replica: last for replica, last in self._last.items() if replica in changes}
        self._waits = {name: sorted(found) for name, found in waits.items()}
        if passed:
            now_busy = {name: seconds / passed for name, seconds in busy.items()}
            self._demand = _averaged(self._demand, now_busy, math.exp(-passed / SMOOTH_S))
            self._steady = _averaged(self._steady, now_busy, math.exp(-passed / STEADY_S))

    def _wait_s(self, now: float, replica: Replica) -> float:
        """Return the mean wait, in seconds, of the requests that a replica has ended most
        recently. If no request has ended since the last look, the previous value remains while
        the replica may be executing a long request."""
        at, wait_s = self._last.get(replica, (-math.inf, 0.0))
        recent = self._recent[replica]
        working = (now - at) * recent.requests <= RUNS * recent.busy_s
        return wait_s if at == now or working else 0.0

    def wait_s(self, model: str) -> float:
        """Return the mean wait of new requests, in seconds: the median over the model's replicas.
        A mean over all replicas would still show an old queue after new replicas have joined."""
        waits = self._waits.get(model)
        return waits[(len(waits) - 1) // 2] if waits else 0.0

    def demand(self, model: str) -> float:
        """Return the busy executors of all replicas of a model."""
        return self._demand.get(model, 0.0)

    def steady_demand(self, model: str) -> float:
        """Return `demand` averaged over a longer time."""
        return self._steady.get(model, 0.0)

    def speed(self, node: str, model: str) -> float | None:
        """Return the requests per second of busy executors; None: not known yet."""
        recent = self._recent.get((node, model))
        if recent is None or recent.requests < FEWEST or not recent.busy_s:
            return None
        return recent.requests / recent.busy_s


def _averaged(
    before: Mapping[str, float], now: Mapping[str, float], keep: float
) -> dict[str, float]:
    return {
        name: keep * before.get(name, 0.0) + (1 - keep) * now.get(name, 0.0)
        for name in before.keys() | now.keys()
    }


def _recent(before: ReplicaCounts, change: ReplicaCounts) -> ReplicaCounts:
    requests, busy_s = before.requests + change.requests, before.busy_s + change.busy_s
    if requests <= MOST:
        return ReplicaCounts(requests, 0.0, busy_s)
    return ReplicaCounts(MOST, 0.0, busy_s * MOST / requests)
