"""Which share of a model's requests each of its nodes gets: as many as it can do.

What a node can do is what it has done for each second its executors were busy. A balancer that
counts connections evens out the rest, so small differences change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

MOST = 256  # HAProxy's largest weight
UNKNOWN = 128
STEADY = 0.2  # weights that differ by less stay as they are


def weights(speeds: Mapping[str, float | None], before: Mapping[str, int]) -> dict[str, int]:
    """A weight in 1 … MOST for each node. `speeds`: requests per second of work; None: not known
    yet, which counts as what is usual. `before`: the weights there were."""
    known = [speed for speed in speeds.values() if speed]
    if not known:
        return {node: before.get(node, UNKNOWN) for node in speeds}
    usual, fastest = median(known), max(known)
    found = {
        node: max(1, round(MOST * (speed or usual) / fastest)) for node, speed in speeds.items()
    }
    return {node: _steady(weight, before.get(node)) for node, weight in found.items()}


def _steady(weight: int, before: int | None) -> int:
    if before is None or abs(weight - before) > STEADY * before:
        return weight
    return before
