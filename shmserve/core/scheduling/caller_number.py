"""What stands for a caller where callers take turns."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Literal

UNKNOWN = 0  # nobody knows whose it is: all of these together are one caller


@lru_cache(maxsize=4096)
def caller_number(kind: Literal["key", "user", "address", "model"], name: str) -> int:
    """The same in every process, so that executors need not know who it is. 32 bits, never
    `UNKNOWN`; two callers of one number share their turns, which nobody can make happen to
    another without having his address or key."""
    digest = blake2b(f"{kind} {name}".encode(errors="surrogateescape"), digest_size=4).digest()
    return int.from_bytes(digest) or 1
