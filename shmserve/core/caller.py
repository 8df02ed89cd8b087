"""Callers: who sent a request or a message, as the kernel and a key say."""

from __future__ import annotations

from msgspec import Struct

REMOTE_UID = -1


class Caller(Struct, frozen=True):
    """Who asks, as the kernel says. `uid` -1: a remote caller; `pid` 0: not known; `socket`: the
    inode of its TCP socket, 0: it has none; `scopes`: of the key that came along."""

    uid: int = REMOTE_UID
    pid: int = 0
    started: int = 0
    socket: int = 0
    scopes: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        return self.uid == REMOTE_UID
