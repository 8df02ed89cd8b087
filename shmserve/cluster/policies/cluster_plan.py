"""One look at all nodes in, what each of them and the balancer should do out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shmserve.cluster.policies import traffic_weights
from shmserve.cluster.policies.model_placement import WantedModel, place
from shmserve.cluster.policies.placement_steps import Held, Replica, next_steps
from shmserve.cluster.policies.replica_scaling import ReplicaScaler, ScalingRule

SMOOTH_S = 10.0  # over which demand and speed are averaged
AGAIN_S = 60.0  # until a model may come to a node again on which it could not be loaded


@dataclass(frozen=True)
class ModelRule:
    """`memory`: bytes of a node's that a replica takes; `scaling`: how many there are."""

    memory: int
    scaling: ScalingRule = field(default_factory=ScalingRule)


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


@dataclass(frozen=True)
class Decision:
    """`orders`: models each node should hold now; `routes`: weight of each node that gets a model's
    requests; `replicas`: how many each model should have; `missing`: how many have no place;
    `moves`: replicas put elsewhere or anew by this decision."""

    orders: dict[str, frozenset[str]]
    routes: dict[str, dict[str, int]]
    replicas: dict[str, int]
    missing: dict[str, int]
    moves: int = 0


class ClusterPlan:
    """What should be where, from look to look. `drain_s`: from the end of a replica's requests to
    its unloading."""

    def __init__(self, rules: Mapping[str, ModelRule], drain_s: float = 2.0) -> None:
        self._rules = rules
        self._drain_s = drain_s
        self._scalers: dict[str, ReplicaScaler] = {}
        self._target: dict[str, set[str]] = {}
        self._counts: dict[Replica, ReplicaCounts] = {}
        self._demand: dict[str, float] = dict.fromkeys(rules, 0.0)
        self._speed: dict[Replica, float] = {}
        self._weights: dict[str, dict[str, int]] = {}
        self._leaving: dict[Replica, float] = {}
        self._barred: dict[Replica, float] = {}
        self._at: float | None = None

    def step(self, now: float, looks: Mapping[str, NodeLook]) -> Decision:
        """`looks`: of the nodes that count; one that is not among them is gone."""
        if not self._scalers:  # replicas that are there were wanted by somebody
            held = Counter(name for look in looks.values() for name in look.held)
            self._scalers = {
                name: ReplicaScaler(rule.scaling, held[name]) for name, rule in self._rules.items()
            }
        replicas = self._measure(now, looks)
        moves, missing = self._place(now, looks, replicas)
        there = Held(
            {node: look.held for node, look in looks.items()},
            {node: look.ready for node, look in looks.items()},
            {node: look.room for node, look in looks.items()},
            self._memory(looks),
        )
        drained = {r for r, since in self._leaving.items() if now - since >= self._drain_s}
        steps = next_steps(self._target, there, drained)
        self._leaving = {replica: self._leaving.get(replica, now) for replica in steps.leaving}
        return Decision(steps.orders, self._routes(looks), replicas, missing, moves)

    def _memory(self, looks: Mapping[str, NodeLook]) -> dict[str, int]:
        """Bytes of each model. One without a rule may have all of its node: it goes first."""
        most = max((look.room for look in looks.values()), default=0)
        held = {name: most for look in looks.values() for name in look.held}
        return held | {name: rule.memory for name, rule in self._rules.items()}

    def _measure(self, now: float, looks: Mapping[str, NodeLook]) -> dict[str, int]:
        """How many replicas each model should have, from what was counted since the last look."""
        passed = now - self._at if self._at is not None else 0.0
        self._at = now
        keep = math.exp(-passed / SMOOTH_S)
        sums: dict[str, list[ReplicaCounts]] = defaultdict(list)
        counts = {
            (node, name): count
            for node, look in looks.items()
            for name, count in look.counts.items()
        }
        for replica, count in counts.items():
            if (before := self._counts.get(replica)) is not None:
                change = count.since(before)
                sums[replica[1]].append(change)
                if change.busy_s:
                    speed = change.requests / change.busy_s
                    self._speed[replica] = (
                        keep * self._speed.get(replica, speed) + (1 - keep) * speed
                    )
        self._counts = counts
        self._speed = {replica: s for replica, s in self._speed.items() if replica in counts}
        ready: dict[str, int] = defaultdict(int)
        for look in looks.values():
            for name in look.ready:
                ready[name] += 1
        wanted = {}
        for name, scaler in self._scalers.items():
            requests = sum(change.requests for change in sums[name])
            waited = sum(change.waited_s for change in sums[name])
            busy = sum(change.busy_s for change in sums[name])
            if passed:
                self._demand[name] = keep * self._demand[name] + (1 - keep) * busy / passed
            queue_s = waited / requests if requests else 0.0
            wanted[name] = scaler.observe(now, ready[name], queue_s, self._demand[name])
        return wanted

    def _place(
        self, now: float, looks: Mapping[str, NodeLook], replicas: Mapping[str, int]
    ) -> tuple[int, dict[str, int]]:
        for node, look in looks.items():
            for name in look.failed:
                self._barred.setdefault((node, name), now)
        self._barred = {r: since for r, since in self._barred.items() if now - since < AGAIN_S}
        # A node seen for the first time may have run before this plan did
        current = {node: self._target.get(node, look.held) for node, look in looks.items()}
        wanted = [
            WantedModel(name, rule.memory, replicas[name], self._demand[name])
            for name, rule in self._rules.items()
        ]
        room = {node: look.room for node, look in looks.items()}
        layout = place(room, wanted, current, self._barred.keys())
        moves = sum(len(layout.on[node] - current[node]) for node in layout.on)
        self._target = layout.on
        return moves, layout.missing()

    def _routes(self, looks: Mapping[str, NodeLook]) -> dict[str, dict[str, int]]:
        homes: dict[str, dict[str, float | None]] = {name: {} for name in self._rules}
        for node, look in looks.items():
            for name in look.ready & self._rules.keys():
                if (node, name) not in self._leaving:
                    homes[name][node] = self._speed.get((node, name))
        self._weights = {
            name: traffic_weights.weights(speeds, self._weights.get(name, {}))
            for name, speeds in homes.items()
        }
        return self._weights
