"""Plan of a cluster: turns a look at all nodes into orders for nodes and routes for balancers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shmserve.cluster.policies import traffic_weights
from shmserve.cluster.policies.measured_load import MeasuredLoad, NodeLook
from shmserve.cluster.policies.model_placement import WantedModel, place
from shmserve.cluster.policies.placement_steps import Held, Replica, next_steps
from shmserve.cluster.policies.replica_scaling import ReplicaScaler, ScalingRule

REST_S = 10.0  # seconds after a move before the next move for balance alone
AGAIN_S = 60.0  # seconds before a model may return to a node that failed to load it


@dataclass(frozen=True)
class ModelRule:
    """Rule for a model.

    Attributes:
        memory: memory of a replica, in bytes.
        scaling: limits for the number of replicas.
    """

    memory: int
    scaling: ScalingRule = field(default_factory=ScalingRule)


@dataclass(frozen=True)
class Decision:
    """Decision of a round.

    Attributes:
        orders: models that each node should hold now.
        routes: by model, weights of the nodes that get requests.
        replicas: wanted number of replicas, by model.
        missing: number of replicas without a place, by model.
        moves: number of replicas that this decision placed on another or an additional node.
    """

    orders: dict[str, frozenset[str]]
    routes: dict[str, dict[str, int]]
    replicas: dict[str, int]
    missing: dict[str, int]
    moves: int = 0


class ClusterPlan:
    """Placement and scaling of models from look to look.

    Args:
        drain_s: seconds from a replica's last routed request to its unloading.
    """

    def __init__(self, rules: Mapping[str, ModelRule], drain_s: float = 2.0) -> None:
        self._rules = rules
        self._drain_s = drain_s
        self._scalers: dict[str, ReplicaScaler] = {}
        self._target: dict[str, set[str]] = {}
        self._load = MeasuredLoad()
        self._moved_at: float | None = None
        self._weights: dict[str, dict[str, int]] = {}
        self._leaving: dict[Replica, float] = {}
        self._barred: dict[Replica, float] = {}

    def step(self, now: float, looks: Mapping[str, NodeLook]) -> Decision:
        """Return the next decision. `looks` has the nodes that count; an absent node is gone."""
        if not self._scalers:  # replicas found at the start were wanted by an earlier controller
            held = Counter(name for look in looks.values() for name in look.held)
            self._scalers = {
                name: ReplicaScaler(rule.scaling, held[name]) for name, rule in self._rules.items()
            }
        replicas = self._replicas(now, looks)
        moves, missing = self._place(now, looks, replicas)
        holdings = Held(
            {node: look.held for node, look in looks.items()},
            {node: look.ready for node, look in looks.items()},
            {node: look.room for node, look in looks.items()},
            self._memory(looks),
        )
        drained = {r for r, since in self._leaving.items() if now - since >= self._drain_s}
        steps = next_steps(self._target, holdings, drained)
        self._leaving = {replica: self._leaving.get(replica, now) for replica in steps.leaving}
        return Decision(steps.orders, self._routes(looks), replicas, missing, moves)

    def _memory(self, looks: Mapping[str, NodeLook]) -> dict[str, int]:
        """Return the memory of each model in bytes. A model without a rule counts as the largest
        node's whole room."""
        largest_room = max((look.room for look in looks.values()), default=0)
        held = {name: largest_room for look in looks.values() for name in look.held}
        return held | {name: rule.memory for name, rule in self._rules.items()}

    def _replicas(self, now: float, looks: Mapping[str, NodeLook]) -> dict[str, int]:
        """Return the wanted number of replicas of each model."""
        self._load.take(now, looks)
        ready = Counter(name for look in looks.values() for name in look.ready)
        return {
            name: scaler.observe(now, ready[name], self._load.wait_s(name), self._load.demand(name))
            for name, scaler in self._scalers.items()
        }

    def _place(
        self, now: float, looks: Mapping[str, NodeLook], replicas: Mapping[str, int]
    ) -> tuple[int, dict[str, int]]:
        for node, look in looks.items():
            for name in look.failed:
                self._barred.setdefault((node, name), now)
        self._barred = {r: since for r, since in self._barred.items() if now - since < AGAIN_S}
        # A node met for the first time may hold models that an earlier plan placed
        current = {node: self._target.get(node, look.held) for node, look in looks.items()}
        wanted = [
            WantedModel(name, rule.memory, replicas[name], self._load.steady_demand(name))
            for name, rule in self._rules.items()
        ]
        room = {node: look.room for node, look in looks.items()}
        self._moved_at = now if self._moved_at is None else self._moved_at
        rested = now - self._moved_at >= REST_S
        layout = place(room, wanted, current, self._barred.keys(), balance=rested)
        moves = sum(len(layout.on[node] - current[node]) for node in layout.on)
        if moves:
            self._moved_at = now
        self._target = layout.on
        return moves, layout.missing()

    def _routes(self, looks: Mapping[str, NodeLook]) -> dict[str, dict[str, int]]:
        homes: dict[str, dict[str, float | None]] = {name: {} for name in self._rules}
        for node, look in looks.items():
            for name in look.ready & self._rules.keys():
                if (node, name) not in self._leaving:
                    homes[name][node] = self._load.speed(node, name)
        self._weights = {
            name: traffic_weights.weights(speeds, self._weights.get(name, {}))
            for name, speeds in homes.items()
        }
        return self._weights
