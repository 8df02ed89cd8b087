"""Caller numbers: identify callers where callers take turns or have shares."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Literal

UNKNOWN = 0  # all requests of unknown callers together count as one caller


@lru_cache(maxsize=4096)
def caller_number(kind: Literal["key", "user", "address", "model"], name: str) -> int:
    """Return a caller's number: 64 bits, never `UNKNOWN`, equal in every process.

    So executors tell callers apart without knowing names. Callers with equal numbers would count
    as a single caller. Finding a name with another caller's number takes about 2**64 tries. IPv6
    networks, the only names available to a caller in large numbers, are always fewer.
    """
    digest = blake2b(f"{kind} {name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) or 1
