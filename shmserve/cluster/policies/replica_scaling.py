"""Number of replicas of a model, decided from the wait of its requests, with hysteresis.

Replicas are added after requests have waited too long for a while. One in ten replicas, and at
least one, is removed after requests have not waited for a long while, if the rest can take over
the work. The capacity of a replica is measured when requests begin to wait.
"""

import math
from dataclasses import dataclass

SHRINKAGE = 10  # one replica in so many is removed at once, at least one
GROWTH = 2.0  # largest factor of growth at once
BUSY = 0.3  # fraction of a replica's highest load; below, more replicas would not help
QUIET = 0.25  # fraction of `queue_s`; below, a replica may be superfluous
SPARE = 0.7  # fraction of a replica's capacity that the rest may have to bear after a removal
LEARNT_S = 3600.0  # seconds until a measured capacity is forgotten


@dataclass(frozen=True)
class ScalingRule:
    """Limits for the number of a model's replicas.

    Attributes:
        least, most: minimum and maximum number.
        queue_s: longest acceptable mean wait of requests, in seconds.
        up_s: seconds of longer waits before replicas are added.
        down_s: seconds of far shorter waits before replicas are removed.
    """

    least: int = 1
    most: int = 1
    queue_s: float = 0.05
    up_s: float = 3.0
    down_s: float = 60.0


class ReplicaScaler:
    """Scaling state of one model."""

    def __init__(self, rule: ScalingRule, replicas: int = 0) -> None:
        self.rule = rule
        self.wanted = min(max(replicas, rule.least), rule.most)
        self._long_since: float | None = None
        self._quiet_since: float | None = None
        self._limit = math.inf  # capacity: busy executors per replica when requests began to wait
        self._most = 0.0  # highest load: busy executors per replica
        self._learnt_at = 0.0

    def observe(self, now: float, ready: int, queue_s: float, demand: float) -> int:
        """Take measurements since the last call, and return the wanted number of replicas. No
        replica is added before all wanted replicas are ready.

        Args:
            ready: number of ready replicas.
            queue_s: wait of new requests, in seconds.
            demand: busy executors of all replicas together.
        """
        if now - self._learnt_at > LEARNT_S:
            self._limit, self._most, self._learnt_at = math.inf, 0.0, now
        each = demand / max(1, ready)
        self._most = max(self._most, each)
        if queue_s > self.rule.queue_s and ready >= self.wanted and each >= BUSY * self._most:
            self._quiet_since = None
            self._long_since = now if self._long_since is None else self._long_since
            if now - self._long_since >= self.rule.up_s:
                self._grow(now, queue_s, demand)
        elif queue_s < QUIET * self.rule.queue_s and self._others_can(demand):
            self._long_since = None
            self._quiet_since = now if self._quiet_since is None else self._quiet_since
            if now - self._quiet_since >= self.rule.down_s:
                self.wanted = self._fewer()
                self._quiet_since = None
        else:
            self._long_since = self._quiet_since = None
        return self.wanted

    def _grow(self, now: float, queue_s: float, demand: float) -> None:
        self._limit, self._learnt_at = demand / self.wanted, now
        times = min(GROWTH, queue_s / self.rule.queue_s)
        self.wanted = min(self.rule.most, max(self.wanted + 1, math.floor(self.wanted * times)))
        self._long_since = None

    def _others_can(self, demand: float) -> bool:
        others = self._fewer()
        return others < self.wanted and demand <= SPARE * self._limit * others

    def _fewer(self) -> int:
        return max(1, self.rule.least, self.wanted - max(1, self.wanted // SHRINKAGE))
