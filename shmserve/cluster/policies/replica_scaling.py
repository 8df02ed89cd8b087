"""How many replicas a model should have: from how long its requests wait, with hysteresis.

More when they wait too long for a while; one in ten less, or one, when they have not waited for a
long while and the others can take their work. What one replica can do is learnt where requests
began to wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHRINKAGE = 10  # one of so many goes at once, but one at least
GROWTH = 2.0  # at most so many times as many at once
BUSY = 0.3  # of what a replica has done at most: with less, more replicas would not help
QUIET = 0.25  # of the longest wait: below it a replica may be one too many
SPARE = 0.7  # of what a replica can do: no more is to be left to each after one has gone
LEARNT_S = 3600.0  # so long it counts what a replica could do


@dataclass(frozen=True)
class ScalingRule:
    """Replicas at least and at most; `queue_s`: what a request should wait at most, on average;
    `up_s`, `down_s`: for so long it must be more, or far less, before anything is done."""

    least: int = 1
    most: int = 1
    queue_s: float = 0.05
    up_s: float = 3.0
    down_s: float = 60.0


class ReplicaScaler:
    """Of one model."""

    def __init__(self, rule: ScalingRule, replicas: int = 0) -> None:
        self.rule = rule
        self.wanted = min(max(replicas, rule.least), rule.most)
        self._long_since: float | None = None
        self._quiet_since: float | None = None
        self._limit = math.inf  # executors that one replica kept busy when requests had to wait
        self._most = 0.0  # executors that one replica has kept busy
        self._learnt_at = 0.0

    def observe(self, now: float, ready: int, queue_s: float, demand: float) -> int:
        """Take what was seen since the last time, and say how many replicas there should be.

        `ready`: replicas that serve; `queue_s`: how long new requests wait; `demand`: executors
        kept busy by all of them. None is added until those wanted before are there.
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
