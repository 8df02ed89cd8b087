"""What stands for a caller, where callers take turns and where each may have a share."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Literal

UNKNOWN = 0  # nobody knows whose it is: all of these together are one caller


@lru_cache(maxsize=4096)
def caller_number(kind: Literal["key", "user", "address", "model"], name: str) -> int:
    """The same in every process, so that executors need not know who it is. 64 bits, never
    `UNKNOWN`. Two callers of one number would be one caller: it takes some 2**64 names to find one
    that has somebody else's, and networks of IPv6, the only names of which anybody has many, are
    never so many."""
    digest = blake2b(f"{kind} {name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) or 1
