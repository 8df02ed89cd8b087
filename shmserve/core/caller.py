"""Callers: senders of requests and messages, as identified by the kernel and a key."""

from __future__ import annotations

from msgspec import Struct

REMOTE_UID = -1


class Caller(Struct, frozen=True):
    """Sender of a request, as identified by the kernel.

    Attributes:
        uid: user id; -1: remote caller.
        pid: process id; 0: unknown.
        started: start of the process, as in `core.registry.Region`; 0: unknown.
        socket: inode of the caller's TCP socket; 0: none.
        scopes: scopes of the key sent with the request.
    """

    uid: int = REMOTE_UID
    pid: int = 0
    started: int = 0
    socket: int = 0
    scopes: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        return self.uid == REMOTE_UID
