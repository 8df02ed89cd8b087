"""From what nodes hold to what they should hold, one step at a time: load before unload.

A model leaves a node once every node it should be on has it ready, and its requests have gone
elsewhere. Where memory allows nothing of that, it leaves first.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

ModelSets = Mapping[str, AbstractSet[str]]  # node -> models
Replica = tuple[str, str]  # node, model


@dataclass(frozen=True)
class Held:
    """Models of each node: `all` that take memory (ready, being loaded or unloaded), and `ready`
    ones. `room`: bytes of each node; `memory`: bytes of each model, also of unwanted ones."""

    all: ModelSets
    ready: ModelSets
    room: Mapping[str, int]
    memory: Mapping[str, int]

    def bytes_of(self, models: AbstractSet[str]) -> int:
        return sum(self.memory.get(name, 0) for name in models)


@dataclass(frozen=True)
class Steps:
    """`orders`: what each node should have in memory now; `leaving`: replicas that get no requests
    any more, to be given up."""

    orders: dict[str, frozenset[str]]
    leaving: frozenset[Replica]


def next_steps(target: ModelSets, held: Held, drained: AbstractSet[Replica]) -> Steps:
    """What to do now. `drained`: replicas that have been leaving for long enough. No order needs
    more than a node's room, unless what it holds already does."""
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
    """Replicas that are not wanted and whose model is ready wherever it is."""
    waited_for = {
        name for node, models in target.items() for name in models - held.ready.get(node, set())
    }
    return {replica for replica in _surplus(target, held) if replica[1] not in waited_for}


def _under_way(
    held: Held, orders: Mapping[str, AbstractSet[str]], leaving: AbstractSet[Replica]
) -> set[str]:
    """Nodes that have something to do."""
    busy = {
        node
        for node, models in held.all.items()
        if orders[node] != models or models - held.ready.get(node, set())
    }
    return busy | {node for node, _ in leaving}


def _in_the_way(target: ModelSets, held: Held, busy: AbstractSet[str]) -> set[Replica]:
    """What is not wanted on nodes that lack something, where nothing is under way on the node nor
    on those that its models wait for, nor on those that these wait for, and so on."""
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
    """Nodes from which goals, goals of goals, and so on, lead to any of `ends`; and these."""
    found = set(ends)
    while more := {node for node, ahead in goals.items() if ahead & found} - found:
        found |= more
    return found


def _orders(target: ModelSets, held: Held, gone: AbstractSet[Replica]) -> dict[str, frozenset[str]]:
    orders = {}
    for node, models in held.all.items():
        kept = {name for name in models if (node, name) not in gone}
        free = held.room[node] - held.bytes_of(models)  # what goes now is free at the next look
        wanted = target.get(node, set()) - models
        for name in sorted(wanted, key=lambda name: (-held.memory.get(name, 0), name)):
            if held.memory.get(name, 0) <= free:
                free -= held.memory.get(name, 0)
                kept.add(name)
        orders[node] = frozenset(kept)
    return orders
