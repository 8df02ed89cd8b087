"""Compression of answers: only successful inferences, only if the client asks for compression."""

import functools
import zlib
from collections.abc import Sequence

_LEVEL = 1  # fastest: tensors compress badly, and a higher level costs processor time
_WINDOW = {"gzip": 31, "deflate": 15}


@functools.lru_cache(maxsize=64)
def choose(accept: str) -> str:
    """Return the coding for an Accept-Encoding field: "gzip", "deflate" or "" for none. The coding
    of greatest weight wins. Codings of equal weight, sent by HTTP libraries by default, leave the
    choice to the server, which then does not compress."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        name, _, rest = part.partition(";")
        weights[name.strip().removeprefix("x-")] = _weight(rest)
    accepted = {name: weight for name, weight in weights.items() if weight and name in _WINDOW}
    if not accepted:
        return ""
    best = max(accepted.values())
    if weights.get("identity", weights.get("*", 0.0)) >= best:
        return ""
    winners = [name for name, weight in accepted.items() if weight == best]
    if len(winners) == 1:
        return winners[0]
    return winners[0] if weights.get("identity", 1.0) == 0.0 else ""


@functools.lru_cache(maxsize=64)
def takes_gzip(accept: str) -> bool:
    """Return True if an Accept-Encoding field accepts gzip at all."""
    parts = (part.partition(";") for part in accept.lower().split(","))
    weights = {name.strip(): _weight(rest) for name, _, rest in parts}
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _weight(parameters: str) -> float:
    """Return the q value of a coding; 0.0 (not acceptable) if the value is malformed."""
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
    """Return all buffers as one compressed body."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[coding])
    parts = [deflater.compress(buffer) for buffer in buffers]
    parts.append(deflater.flush())
    return b"".join(parts)
