"""Plan of a cluster: turns a look at all nodes into orders for nodes and routes for balancers.

Nodes load before they unload. A model leaves a node once the model is ready on every target node,
and requests have been drained. If memory does not allow any such step, the model leaves first.

Each node gets a share of a model's requests in proportion to its speed: requests executed per
second of busy executors. A balancer that counts connections evens out the rest, so small
differences are ignored.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median

from shmserve.cluster.policies.measured_load import MeasuredLoad, NodeLook
from shmserve.cluster.policies.model_placement import WantedModel, place
from shmserve.cluster.policies.replica_scaling import ReplicaScaler, ScalingRule

REST_S = 10.0  # seconds after a move before the next move for balance alone
AGAIN_S = 60.0  # seconds before a model may return to a node that failed to load it
ModelSets = Mapping[str, AbstractSet[str]]  # node -> models
Replica = tuple[str, str]  # node, model
MOST = 256  # HAProxy's largest weight
UNKNOWN_WEIGHT = 128
STEADY = 0.2  # fraction of a weight; smaller changes are not made


@dataclass(frozen=True)
class Held:
    """Models on the nodes.

    Attributes:
        all: models of each node that take memory: ready, being loaded or being unloaded.
        ready: ready models of each node.
        room: memory of each node, in bytes.
        memory: memory of each model, in bytes, also of unwanted models.
    """

    all: ModelSets
    ready: ModelSets
    room: Mapping[str, int]
    memory: Mapping[str, int]

    def bytes_of(self, models: AbstractSet[str]) -> int:
        return sum(self.memory.get(name, 0) for name in models)


@dataclass(frozen=True)
class Steps:
    """Next step of the nodes. `orders`: models that each node should have in memory now. `leaving`:
    replicas to give up, which get no more requests."""

    orders: dict[str, frozenset[str]]
    leaving: frozenset[Replica]


def next_steps(target: ModelSets, held: Held, drained: AbstractSet[Replica]) -> Steps:
    """Return the next step. No order needs more than a node's room, unless the node exceeds its
    room already. `drained`: replicas that have been leaving for long enough."""
    leaving = _replaced(target, held)
    orders = _orders(target, held, leaving & drained)
    leaving |= _in_the_way(target, held, _under_way(held, orders, leaving))
    return Steps(_orders(target, held, leaving & drained), frozenset(leaving))


def _surplus(target: ModelSets, held: Held) -> set[Replica]:
    return {
        (node, name)
        for node, models in held.all.items()
        for name in models - target.get(node, set())
    }


def _replaced(target: ModelSets, held: Held) -> set[Replica]:
    """Return unwanted replicas whose models are ready on all target nodes."""
    waited_for = {
        name for node, models in target.items() for name in models - held.ready.get(node, set())
    }
    return {replica for replica in _surplus(target, held) if replica[1] not in waited_for}


def _under_way(
    held: Held, orders: Mapping[str, AbstractSet[str]], leaving: AbstractSet[Replica]
) -> set[str]:
    """Return nodes that load, unload or drain models."""
    busy = {
        node
        for node, models in held.all.items()
        if orders[node] != models or models - held.ready.get(node, set())
    }
    return busy | {node for node, _ in leaving}


def _in_the_way(target: ModelSets, held: Held, busy: AbstractSet[str]) -> set[Replica]:
    """Return unwanted replicas that must leave first because waiting cannot free memory: the node
    lacks a model, is not busy, and waits for no busy node. A node waits for the nodes on which
    its unwanted models still have to become ready, and for every node that those wait for."""
    lacking = {node for node, models in target.items() if models - held.all.get(node, set())}
    surplus = _surplus(target, held)
    if not lacking or not surplus:
        return set()
    homes = {
        name: {
            node
            for node, models in target.items()
            if name in models and name not in held.ready.get(node, set())
        }
        for name in {name for _, name in surplus}
    }
    goals: dict[str, set[str]] = {node: set() for node, _ in surplus}
    for node, name in surplus:
        goals[node] |= homes[name]
    waiting = _reaching(busy, goals)
    return {replica for replica in surplus if replica[0] in lacking - waiting}


def _reaching(ends: AbstractSet[str], goals: Mapping[str, AbstractSet[str]]) -> set[str]:
    """Return `ends` and all nodes from which a path of goals leads to `ends`."""
    reaching = set(ends)
    while more := {node for node, ahead in goals.items() if ahead & reaching} - reaching:
        reaching |= more
    return reaching


def _orders(target: ModelSets, held: Held, gone: AbstractSet[Replica]) -> dict[str, frozenset[str]]:
    orders = {}
    for node, models in held.all.items():
        kept = {name for name in models if (node, name) not in gone}
        # memory of models that leave now is free in the next round
        free = held.room[node] - held.bytes_of(models)
        to_load = target.get(node, set()) - models
        for name in sorted(to_load, key=lambda name: (-held.memory.get(name, 0), name)):
            if held.memory.get(name, 0) <= free:
                free -= held.memory.get(name, 0)
                kept.add(name)
        orders[node] = frozenset(kept)
    return orders


@dataclass(frozen=True)
class ModelRule:
    """Rule for a model. `memory`: memory of a replica, in bytes. `scaling`: limits for the number
    of replicas."""

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
    """Placement and scaling of models from look to look. `drain_s`: seconds from a replica's last
    routed request to its unloading."""

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
            name: weights(speeds, self._weights.get(name, {})) for name, speeds in homes.items()
        }
        return self._weights


def weights(speeds: Mapping[str, float | None], before: Mapping[str, int]) -> dict[str, int]:
    """Return a weight in 1 … MOST for each node. `speeds`: requests per second of busy executors;
    None: unknown, taken as the median. `before`: previous weights."""
    known_speeds = [speed for speed in speeds.values() if speed]
    if not known_speeds:
        return {node: before.get(node, UNKNOWN_WEIGHT) for node in speeds}
    usual, fastest = median(known_speeds), max(known_speeds)
    exact = {
        node: max(1, round(MOST * (speed or usual) / fastest)) for node, speed in speeds.items()
    }
    return {node: _steady(weight, before.get(node)) for node, weight in exact.items()}


def _steady(weight: int, before: int | None) -> int:
    if before is None or abs(weight - before) > STEADY * before:
        return weight
    return before
