"""Placement of models on nodes: packed by memory, spread by demand, with few moves.

A model has at most one replica on a node. A replica stays unless the replica is no longer wanted,
another model needs the room for an only replica, or one node has far more work than another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

MARGIN = 0.25  # fraction of the busiest node's load that a move for balance must gain at least

Barred = AbstractSet[tuple[str, str]]  # pairs (node, model) that failed to load recently


@dataclass(frozen=True)
class WantedModel:
    """Model to place. `memory`: memory of a replica, in bytes. `replicas`: wanted number of nodes.
    `demand`: busy executors of all replicas together."""

    name: str
    memory: int
    replicas: int = 1
    demand: float = 0.0


@dataclass
class Layout:
    """Models of each node, with the resulting free memory, load and replica counts. `room`: memory
    of each node for models, in bytes."""

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
        """Return the demand on each replica of a model once all replicas are placed."""
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
        """Return True if a replica fits on a node, is not there yet, and is not barred."""
        fits = self.models[model].memory <= self.free[node]
        return fits and model not in self.on[node] and (node, model) not in barred

    def served(self) -> int:
        """Return the number of models with a replica."""
        return sum(1 for name, model in self.models.items() if model.replicas and self.count[name])

    def missing(self) -> dict[str, int]:
        """Return the number of replicas without a place, by model."""
        lacking = {name: model.replicas - self.count[name] for name, model in self.models.items()}
        return {name: number for name, number in lacking.items() if number > 0}


def place(
    room: Mapping[str, int],
    wanted: Sequence[WantedModel],
    current: Mapping[str, AbstractSet[str]],
    barred: Barred = frozenset(),
    balance: bool = True,
) -> Layout:
    """Return the next layout.

    Every model gets a replica before any model gets a second one. If packing the largest models
    first into the tightest rooms finds a place for a replica of each model, the layout has a
    replica of each model. Equal arguments give equal results. If each result is passed back as
    `current`, the layout changes by at most one move per call, until no move is left.

    `current`: previous layout. `balance`: allow a move for balance alone.
    """
    models = {model.name: model for model in wanted}
    layout = _kept(Layout(room, models), current, barred)
    _fill(layout, _lacking(layout), barred)
    if all(layout.count[name] for name, model in models.items() if model.replicas):
        if balance and not layout.missing():
            _balance(layout, barred)
        return layout
    for sticky in (current, {}):  # first try to keep as many replicas in place as possible
        other = _packed(Layout(room, models), sticky, barred)
        _keep_more(other, current, barred)
        _fill(other, _lacking(other), barred)
        if other.served() > layout.served():
            layout = other
    return layout


def _kept(layout: Layout, current: Mapping[str, AbstractSet[str]], barred: Barred) -> Layout:
    """Keep the replicas that are wanted, not in excess, and fit on nodes that still exist."""
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
    """Return a model name for each replica without a place: first replicas before second ones,
    large models before small ones."""
    ranked = (
        (rank, -model.memory, -model.demand, name)
        for name, model in layout.models.items()
        for rank in range(layout.count[name], model.replicas)
    )
    return [name for *_, name in sorted(ranked)]


def _fill(layout: Layout, names: Iterable[str], barred: Barred) -> None:
    """Place each replica on the node with the least load that takes it, if any."""
    for name in names:
        homes = [node for node in layout.room if layout.takes(node, name, barred)]
        if homes:
            layout.add(min(homes, key=lambda node: _quiet(layout, node)), name)


def _quiet(layout: Layout, node: str) -> tuple[float, float, str]:
    return (layout.load[node], -layout.free[node] / max(1, layout.room[node]), node)


def _packed(layout: Layout, sticky: Mapping[str, AbstractSet[str]], barred: Barred) -> Layout:
    """Place a replica of each model, largest first: on a node in `sticky`, else on the node with
    the least free memory that takes it."""
    for name in _lacking(layout):
        homes = [node for node in layout.room if layout.takes(node, name, barred)]
        if layout.count[name] or not homes:
            continue
        current_homes = [node for node in homes if name in sticky.get(node, ())]
        layout.add(min(current_homes or homes, key=lambda node: (layout.free[node], node)), name)
    return layout


def _keep_more(layout: Layout, current: Mapping[str, AbstractSet[str]], barred: Barred) -> None:
    """Keep further replicas on their current nodes while there is room."""
    for node in sorted(layout.room):
        for name in sorted(current.get(node, ())):
            model = layout.models.get(name)
            if model and layout.count[name] < model.replicas and layout.takes(node, name, barred):
                layout.add(node, name)


def _balance(layout: Layout, barred: Barred) -> None:
    """Move a replica away from the busiest node, if both nodes then have a load at least MARGIN
    below the busiest load.

    A move back would have to gain MARGIN again, so replicas do not move to and fro while loads
    change by less.
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
    busy = layout.load[busiest]
    # A tiny load times (1 - MARGIN) is rounded to the same load, so the first comparison is needed.
    if best is not None and best[0] < busy and best[0] <= (1 - MARGIN) * busy:
        layout.remove(busiest, best[1])
        layout.add(best[2], best[1])
