"""Which process holds a client's TCP socket: whose end is the end of its GPU memory.

The kernel's socket table names the user and the socket, not the process. That is found among
the descriptors of the user's processes, as far as the server may look at them: its own user's,
or everybody's if it is root.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator

from msgspec.structs import replace

from shmserve.core.regions.region_book import Caller
from shmserve.transport.peer_credentials import started_at

_REMEMBERED = 256
_seen: OrderedDict[int, str] = OrderedDict()  # the descriptor in /proc a socket was last found as


def with_process(caller: Caller) -> Caller:
    """The caller with its process, if exactly one holds its socket."""
    if caller.pid or not caller.socket:
        return caller
    held = f"socket:[{caller.socket}]"
    path = _seen.get(caller.socket, "")
    if not path or _link(path) != held:
        found = list(_holding(held, caller.uid))
        if len({entry.split("/")[2] for entry in found}) != 1:
            return caller
        path = found[0]
        _seen[caller.socket] = path
        while len(_seen) > _REMEMBERED:
            _seen.popitem(last=False)
    pid = int(path.split("/")[2])
    started = started_at(pid)
    if not started or _link(path) != held:  # it has just ended
        return caller
    return replace(caller, pid=pid, started=started)


def _holding(held: str, uid: int) -> Iterator[str]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid != uid:
                continue
            folder = f"/proc/{entry.name}/fd"
            for descriptor in os.listdir(folder):
                if _link(f"{folder}/{descriptor}") == held:
                    yield f"{folder}/{descriptor}"
        except OSError:
            continue  # it has ended, or is not ours to look at


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
