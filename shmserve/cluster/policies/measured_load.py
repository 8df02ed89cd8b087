"""What nodes say of their replicas, and what follows: how long requests wait, how much is to do.

Counts only grow, so two looks tell what came between them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

SMOOTH_S = 10.0  # over which demand is averaged
STEADY_S = 60.0  # the same, for what is dear to follow
FEWEST = 50  # requests after which the speed of a replica is known: times of runs differ
MOST = 500  # requests that count for it
RUNS = 2.0  # mean ones; who has ended no request for longer has none

Replica = tuple[str, str]  # node, model


@dataclass(frozen=True)
class ReplicaCounts:
    """Of one model on one node, since its service began: requests executed, and seconds that they
    waited for an executor and kept one busy."""

    requests: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """What came since then; all of it, if the service has begun anew."""
        if self.requests < before.requests:
            return self
        return ReplicaCounts(
            self.requests - before.requests,
            max(0.0, self.waited_s - before.waited_s),
            max(0.0, self.busy_s - before.busy_s),
        )


@dataclass(frozen=True)
class NodeLook:
    """What a node says of itself. `room`: bytes for models; `held`: models that take memory there;
    `ready`: those that serve; `failed`: those that could not be loaded, and why."""

    room: int
    held: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, ReplicaCounts] = field(default_factory=dict)


class MeasuredLoad:
    """From look to look."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._counts: dict[Replica, ReplicaCounts] = {}
        self._recent: dict[Replica, ReplicaCounts] = {}  # of the last MOST requests or so
        self._last: dict[Replica, tuple[float, float]] = {}  # when requests ended, their mean wait
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
        """Mean wait of the requests that a replica has ended last. None may end from one look to
        the next while it works: runs may take longer than that."""
        at, wait_s = self._last.get(replica, (-math.inf, 0.0))
        recent = self._recent[replica]
        working = (now - at) * recent.requests <= RUNS * recent.busy_s
        return wait_s if at == now or working else 0.0

    def wait_s(self, model: str) -> float:
        """Mean wait at the middle one of a model's replicas: what new requests meet. A mean of all
        would go on telling of a queue that has formed before others came."""
        waits = self._waits.get(model)
        return waits[(len(waits) - 1) // 2] if waits else 0.0

    def demand(self, model: str) -> float:
        """Executors that all of a model's replicas keep busy."""
        return self._demand.get(model, 0.0)

    def steady_demand(self, model: str) -> float:
        """The same, over a longer time."""
        return self._steady.get(model, 0.0)

    def speed(self, node: str, model: str) -> float | None:
        """Requests per second of work; None: not known yet."""
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
