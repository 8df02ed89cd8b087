"""Peer credentials: which user and process a client's connection leads to, as the kernel says.

A Unix socket tells uid and pid (SO_PEERCRED). For a loopback TCP connection, the kernel's table of
sockets tells the owner of the client's socket (`local_peers`). All other clients are remote.

The table names the user and the socket, not the process. The process is found among the
descriptors of the user's processes, as far as the server may see them: processes of its own user,
or of all users if the server is root (`with_process`).
"""

import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from shmserve.core.caller import Caller
from shmserve.transport.trust import local_peers
from shmserve.transport.trust.process_identity import of_peer, started_at

_REMEMBERED = 256
# socket inode -> path in /proc of the descriptor that last led to it
_seen: OrderedDict[int, str] = OrderedDict()

_ANY = ("0.0.0.0", "::")
REMOTE = Caller()


class RemoteAddresses:
    """Set of listening addresses behind a proxy, where no caller counts as local.

    Addresses have the form of the settings: ``HOST:PORT``, ``[::1]:PORT``, ``unix:PATH``. An
    address of all interfaces stands for its port on every interface.
    """

    def __init__(self, binds: Iterable[str]) -> None:
        self._paths: set[str] = set()
        self._pairs: set[tuple[str, int]] = set()
        self._ports: set[int] = set()
        for bind in binds:
            if bind.startswith("unix:"):
                self._paths.add(os.path.abspath(bind.removeprefix("unix:")))
            else:
                self._add(bind)

    def _add(self, bind: str) -> None:
        host, _, port = bind.rpartition(":")
        for *_, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            if address[0] in _ANY:
                self._ports.add(int(port))
            else:
                self._pairs.add((str(address[0]), int(port)))

    def __contains__(self, own: object) -> bool:
        """Return whether `own`, a connection's local address from `getsockname`, is in the set."""
        if isinstance(own, str):
            return bool(self._paths) and os.path.abspath(own) in self._paths
        if not isinstance(own, tuple) or not (self._pairs or self._ports):
            return False
        host = str(own[0]).removeprefix("::ffff:")
        return own[1] in self._ports or (host, own[1]) in self._pairs


_remote = RemoteAddresses(())


def take_as_remote(binds: Iterable[str]) -> None:
    """Treat callers who connect to one of these addresses of the server as remote from now on."""
    global _remote
    _remote = RemoteAddresses(binds)


def caller_of(sock: socket.socket) -> Caller:
    """Return the user (and process, if known) at the other end of a connected socket."""
    try:
        if sock.getsockname() in _remote:
            return REMOTE
        if sock.family == socket.AF_UNIX:
            return _of_unix(sock)
        if (peer := local_peers.peer_of(sock)) is not None:
            return Caller(peer.uid, socket=peer.inode)
    except OSError:
        pass  # the peer is gone
    return REMOTE


def with_process(caller: Caller) -> Caller:
    """Return the caller with its process, if exactly one process holds the caller's socket."""
    if caller.pid or not caller.socket:
        return caller
    held = f"socket:[{caller.socket}]"
    path = _seen.get(caller.socket, "")
    if not path or _link(path) != held:
        descriptors = list(_holding(held, caller.uid))
        if len({entry.split("/")[2] for entry in descriptors}) != 1:
            return caller
        path = descriptors[0]
        _seen[caller.socket] = path
        while len(_seen) > _REMEMBERED:
            _seen.popitem(last=False)
    pid = int(path.split("/")[2])
    started = started_at(pid)
    if not started or _link(path) != held:  # the process has just ended
        return caller
    return replace(caller, pid=pid, started=started)


def _of_unix(sock: socket.socket) -> Caller:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", raw)
    return Caller(uid, *of_peer(sock, pid))


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
            continue  # the process has ended, or may not be seen


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
