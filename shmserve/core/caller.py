"""Callers: senders of requests and messages, as identified by the kernel and a key."""

from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from msgspec import Struct

REMOTE_UID = -1
UNKNOWN_CALLER = 0  # all requests of unknown callers together count as one caller


class Caller(Struct, frozen=True):
    """Sender of a request, as identified by the kernel.

    Attributes:
        uid: user id; -1: remote caller.
        pid: process id; 0: unknown.
        started: start of the process, as in `core.registry.Region`; 0: unknown.
        socket: inode of the caller's TCP socket; 0: none.
        scopes: scopes of the key sent with the request.
        key: name of this key; empty: none.
        key_refused: whether the request had a key that is unknown or expired.
    """

    uid: int = REMOTE_UID
    pid: int = 0
    started: int = 0
    socket: int = 0
    scopes: tuple[str, ...] = ()
    key: str = ""
    key_refused: bool = False

    @property
    def remote(self) -> bool:
        return self.uid == REMOTE_UID


@lru_cache(maxsize=4096)
def caller_number(kind: Literal["key", "user", "address", "model"], name: str) -> int:
    """Return a caller's number: 64 bits, never `UNKNOWN_CALLER`, equal in every process.

    So executors tell callers apart without knowing names. Callers with equal numbers would count
    as a single caller. Finding a name with another caller's number takes about 2**64 tries. IPv6
    networks, the only names available to a caller in large numbers, are always fewer.
    """
    digest = blake2b(f"{kind} {name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) or 1
