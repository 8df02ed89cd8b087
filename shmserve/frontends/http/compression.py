"""Compression of answers: only of successful inferences, only where it was asked for."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

_LEVEL = 1  # tensors compress badly; a server's processor has better to do
_WINDOW = {"gzip": 31, "deflate": 15}


@functools.lru_cache(maxsize=64)
def choose(accept: str) -> str:
    """The coding for an Accept-Encoding field: "gzip", "deflate" or "" for none.

    The one with the greatest weight. Several of equal weight, as HTTP libraries send
    by default, leave the choice to the server, which then does not compress.
    """
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        name, _, rest = part.partition(";")
        weights[name.strip().removeprefix("x-")] = _weight(rest)
    known = {name: weight for name, weight in weights.items() if weight and name in _WINDOW}
    if not known:
        return ""
    best = max(known.values())
    if weights.get("identity", weights.get("*", 0.0)) >= best:
        return ""
    winners = [name for name, weight in known.items() if weight == best]
    if len(winners) == 1:
        return winners[0]
    return winners[0] if weights.get("identity", 1.0) == 0.0 else ""


@functools.lru_cache(maxsize=64)
def takes_gzip(accept: str) -> bool:
    """Whether gzip is acceptable at all, by an Accept-Encoding field."""
    parts = (part.partition(";") for part in accept.lower().split(","))
    weights = {name.strip(): _weight(rest) for name, _, rest in parts}
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _weight(parameters: str) -> float:
    """The q value; what cannot be read counts as not acceptable."""
    for parameter in parameters.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0


def compress(buffers: Sequence[bytes | memoryview], coding: str) -> bytes:
    """All buffers as one compressed body."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[coding])
    parts = [deflater.compress(buffer) for buffer in buffers]
    parts.append(deflater.flush())
    return b"".join(parts)
