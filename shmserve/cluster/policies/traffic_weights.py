"""Traffic weights: each node gets a share of a model's requests in proportion to its speed.

Speed is requests executed per second of busy executors. A balancer that counts connections evens
out the rest, so small differences are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

MOST = 256  # HAProxy's largest weight
UNKNOWN = 128
STEADY = 0.2  # fraction of a weight; smaller changes are not made


def weights(speeds: Mapping[str, float | None], before: Mapping[str, int]) -> dict[str, int]:
    """Return a weight in 1 … MOST for each node. `speeds`: requests per second of busy executors;
    None: unknown, taken as the median. `before`: previous weights."""
    known_speeds = [speed for speed in speeds.values() if speed]
    if not known_speeds:
        return {node: before.get(node, UNKNOWN) for node in speeds}
    usual, fastest = median(known_speeds), max(known_speeds)
    exact = {
        node: max(1, round(MOST * (speed or usual) / fastest)) for node, speed in speeds.items()
    }
    return {node: _steady(weight, before.get(node)) for node, weight in exact.items()}


def _steady(weight: int, before: int | None) -> int:
    if before is None or abs(weight - before) > STEADY * before:
        return weight
    return before
