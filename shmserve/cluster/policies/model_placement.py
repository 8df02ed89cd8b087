"""Which models live on which nodes: packed by memory, spread by demand, moved as little as can be.

A model has at most one replica on a node. What is there stays, except where it is not wanted any
more, where a model would have none without the room, or where one node has far more to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

MARGIN = 0.25  # of the busiest load: what a move for balance must at least win

Barred = AbstractSet[tuple[str, str]]  # (node, model): failed there a moment ago


@dataclass(frozen=True)
class WantedModel:
    """`memory`: bytes of a node's that one replica takes; `replicas`: nodes it should be on;
    `demand`: executors that it keeps busy, all replicas together."""

    name: str
    memory: int
    replicas: int = 1
    demand: float = 0.0


@dataclass
class Layout:
    """Models of each node, and what follows from them. `room`: bytes of each node for models."""

    room: Mapping[str, int]
    models: Mapping[str, WantedModel]
    on: dict[str, set[str]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.on = {node: set() for node in self.room}
        self.free = dict(self.room)
        self.load = dict.fromkeys(self.room, 0.0)

    def share(self, model: str) -> float:
        """Demand that each replica of a model has, once all are there."""
        return self.models[model].demand / max(1, self.models[model].replicas)

    def add(self, node: str, model: str) -> None:
        self._change(node, model, 1)
        self.on[node].add(model)

    def remove(self, node: str, model: str) -> None:
        self.on[node].remove(model)
        self._change(node, model, -1)

    def _change(self, node: str, model: str, by: int) -> None:
        self.free[node] -= by * self.models[model].memory
        self.load[node] += by * self.share(model)
        self.count[model] += by

    def takes(self, node: str, model: str, barred: Barred) -> bool:
        """Whether a node has room for a model that it does not have."""
        fits = self.models[model].memory <= self.free[node]
        return fits and model not in self.on[node] and (node, model) not in barred

    def served(self) -> int:
        """Models that have a replica."""
        return sum(1 for name, model in self.models.items() if model.replicas and self.count[name])

    def missing(self) -> dict[str, int]:
        """Replicas that have no place."""
        lacking = {name: model.replicas - self.count[name] for name, model in self.models.items()}
        return {name: number for name, number in lacking.items() if number > 0}


def place(
    room: Mapping[str, int],
    wanted: Sequence[WantedModel],
    current: Mapping[str, AbstractSet[str]],
    barred: Barred = frozenset(),
    balance: bool = True,
) -> Layout:
    """The next layout, `current` being the one before; without `balance` nothing moves for that
    alone. The same arguments give the same answer, and one that is given back as `current` is
    changed by one move at most, until none is left.

    Every model has a replica before any has a second one. If largest-first into the tightest room
    has a place for one of each, each has one.
    """
    models = {model.name: model for model in wanted}
    layout = _kept(Layout(room, models), current, barred)
    _fill(layout, _lacking(layout), barred)
    if all(layout.count[name] for name, model in models.items() if model.replicas):
        if balance and not layout.missing():
            _balance(layout, barred)
        return layout
    for sticky in (current, {}):  # first with as many as can be where they are
        other = _packed(Layout(room, models), sticky, barred)
        _keep_more(other, current, barred)
        _fill(other, _lacking(other), barred)
        if other.served() > layout.served():
            layout = other
    return layout


def _kept(layout: Layout, current: Mapping[str, AbstractSet[str]], barred: Barred) -> Layout:
    """What stays: wanted, on nodes that are there, not more than wanted, not more than fits."""
    homes: dict[str, list[str]] = {name: [] for name in layout.models}
    for node in sorted(layout.room):
        held = (name for name in current.get(node, ()) if name in layout.models)
        for name in sorted(held, key=lambda name: (-layout.models[name].memory, name)):
            if layout.models[name].replicas and layout.takes(node, name, barred):
                layout.add(node, name)
                homes[name].append(node)
    for name, nodes in sorted(homes.items()):
        while len(nodes) > layout.models[name].replicas:
            busiest = max(nodes, key=lambda node: (layout.load[node], node))
            nodes.remove(busiest)
            layout.remove(busiest, name)
    return layout


def _lacking(layout: Layout) -> list[str]:
    """A name for each replica without a place: first ones first, large ones before small ones."""
    ranked = (
        (rank, -model.memory, -model.demand, name)
        for name, model in layout.models.items()
        for rank in range(layout.count[name], model.replicas)
    )
    return [name for *_, name in sorted(ranked)]


def _fill(layout: Layout, names: Iterable[str], barred: Barred) -> None:
    """Give each a place where least is to do, if there is one."""
    for name in names:
        homes = [node for node in layout.room if layout.takes(node, name, barred)]
        if homes:
            layout.add(min(homes, key=lambda node: _quiet(layout, node)), name)


def _quiet(layout: Layout, node: str) -> tuple[float, float, str]:
    return (layout.load[node], -layout.free[node] / max(1, layout.room[node]), node)


def _packed(layout: Layout, sticky: Mapping[str, AbstractSet[str]], barred: Barred) -> Layout:
    """One replica of each, largest first, where `sticky` has it or where it fits most tightly."""
    for name in _lacking(layout):
        homes = [node for node in layout.room if layout.takes(node, name, barred)]
        if layout.count[name] or not homes:
            continue
        known = [node for node in homes if name in sticky.get(node, ())]
        layout.add(min(known or homes, key=lambda node: (layout.free[node], node)), name)
    return layout


def _keep_more(layout: Layout, current: Mapping[str, AbstractSet[str]], barred: Barred) -> None:
    """Further replicas stay where they are, as far as there is still room for them."""
    for node in sorted(layout.room):
        for name in sorted(current.get(node, ())):
            model = layout.models.get(name)
            if model and layout.count[name] < model.replicas and layout.takes(node, name, barred):
                layout.add(node, name)


def _balance(layout: Layout, barred: Barred) -> None:
    """Move a replica from the busiest node, if both nodes then have MARGIN less to do than it had.

    The way back would have to win as much again, so nothing moves to and fro while loads
    change by less than that.
    """
    if not layout.load:
        return
    busiest = max(layout.load, key=lambda node: (layout.load[node], node))
    best: tuple[float, str, str] | None = None
    for name in sorted(layout.on[busiest]):
        homes = [node for node in layout.room if layout.takes(node, name, barred)]
        if not homes or not layout.share(name):
            continue
        home = min(homes, key=lambda node: _quiet(layout, node))
        higher = max(
            layout.load[home] + layout.share(name), layout.load[busiest] - layout.share(name)
        )
        if best is None or higher < best[0]:
            best = (higher, name, home)
    if best is not None and best[0] <= (1 - MARGIN) * layout.load[busiest]:
        layout.remove(busiest, best[1])
        layout.add(best[2], best[1])
