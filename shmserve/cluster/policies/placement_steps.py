"""Steps from the models that nodes hold to the models that nodes should hold: load before unload.

A model leaves a node once the model is ready on every target node, and requests have been drained.
If memory does not allow any such step, the model leaves first.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

ModelSets = Mapping[str, AbstractSet[str]]  # node -> models
Replica = tuple[str, str]  # node, model


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
    """Next step of the nodes.

    Attributes:
        orders: models that each node should have in memory now.
        leaving: replicas to give up, which get no more requests.
    """

    orders: dict[str, frozenset[str]]
    leaving: frozenset[Replica]


def next_steps(target: ModelSets, held: Held, drained: AbstractSet[Replica]) -> Steps:
    """Return the next step. No order needs more than a node's room, unless the node exceeds its
    room already.

    Args:
        drained: replicas that have been leaving for long enough.
    """
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
