"""Peer credentials: which user and process a client's connection leads to, as the kernel says.

A Unix socket tells uid and pid (SO_PEERCRED). For a loopback TCP connection, the kernel's socket
table of this network namespace tells the owner of the client's socket. The table is asked through
sock_diag, or read from /proc/net/tcp where sock_diag is not allowed. All other clients are remote.

Only a socket that a process holds counts (inode not 0): the rest of a closed connection is listed
as root's. The server's own socket must still be connected after the look, or the table may have
told of a later user of the same port.

The table names the user and the socket, not the process. The process is found among the
descriptors of the user's processes, as far as the server may see them: processes of its own user,
or of all users if the server is root (`with_process`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from shmserve.core.caller import Caller
from shmserve.transport.trust.process_identity import of_peer, started_at

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
# inet_diag_req_v2: family, protocol, ext, pad, states; ports big-endian, addresses, if, cookie
_REQUEST = struct.Struct("=BBBxI")
_ID = struct.Struct("!HH16s16s")
_ID_END = struct.Struct("=III")
_NO_COOKIE = 0xFFFFFFFF
# inet_diag_msg: family, state, timer, retrans, id (48 bytes), expires, rqueue, wqueue, uid, inode
_REPLY = struct.Struct("=BBBB48sIIIII")
_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT = 1, 4, 5, 8
_ITS_STATES = (_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2)  # FIN_WAIT: the client has only ended sending
_OUR_STATES = (_ESTABLISHED, _CLOSE_WAIT)
_TIMEOUT_S = 1.0

_REMEMBERED = 256
# socket inode -> path in /proc of the descriptor that last led to it
_seen: OrderedDict[int, str] = OrderedDict()

_ANY = ("0.0.0.0", "::")
REMOTE = Caller()
_SocketEntry = tuple[int, int, int]  # state, uid, inode


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
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            caller = of_addresses(sock.getpeername(), sock.getsockname())
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return caller if state in _OUR_STATES else REMOTE
    except OSError:
        pass  # the peer is gone
    return REMOTE


def user_of(sock: socket.socket) -> int:
    """Return the uid of the peer of a Unix socket. Raises OSError if the peer has gone."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def of_addresses(client: tuple[object, ...], server: tuple[object, ...]) -> Caller:
    """Return the user of the loopback TCP connection from `client` to `server`, given as (host,
    port)."""
    theirs, ours = _address(client), _address(server)
    if theirs is None or ours is None or not theirs[0].is_loopback or server in _remote:
        return REMOTE
    entry = _ask_kernel(theirs, ours) or _look_up(theirs, ours)
    if entry is None:
        return REMOTE
    state, uid, inode = entry
    return Caller(uid, socket=inode) if state in _ITS_STATES and inode else REMOTE


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


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(given: tuple[object, ...]) -> tuple[_Ip, int] | None:
    try:
        ip = ipaddress.ip_address(str(given[0]).partition("%")[0])
        port = int(str(given[1]))
    except (ValueError, IndexError):
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip, port) if 0 < port < 65536 else None


def _families(ip: _Ip) -> tuple[int, ...]:
    # An IPv4 connection's client may have an IPv6 socket with mapped addresses.
    return (socket.AF_INET, socket.AF_INET6) if ip.version == 4 else (socket.AF_INET6,)


def _packed(ip: _Ip, family: int) -> bytes:
    if family == socket.AF_INET6 and ip.version == 4:
        return b"\0" * 10 + b"\xff\xff" + ip.packed
    return ip.packed


def _ask_kernel(theirs: tuple[_Ip, int], ours: tuple[_Ip, int]) -> _SocketEntry | None:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as sock:
            sock.settimeout(_TIMEOUT_S)
            for family in _families(theirs[0]):
                entry = _ask_family(sock, family, theirs, ours)
                if entry is not None:
                    return entry
    except OSError:
        pass  # perhaps not allowed in this container
    return None


def _ask_family(
    sock: socket.socket, family: int, theirs: tuple[_Ip, int], ours: tuple[_Ip, int]
) -> _SocketEntry | None:
    source, target = _packed(theirs[0], family), _packed(ours[0], family)
    query = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + _ID.pack(theirs[1], ours[1], source, target)
        + _ID_END.pack(0, _NO_COOKIE, _NO_COOKIE)
    )
    size = _HEADER.size + len(query)
    sock.sendto(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + query, (0, 0))
    reply = sock.recv(4096)
    if _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # NLMSG_ERROR: no such socket
    _, state, _, _, identity, _, _, _, uid, inode = _REPLY.unpack_from(reply, _HEADER.size)
    ports_and_addresses = _ID.unpack_from(identity)
    expected = (theirs[1], ours[1], source.ljust(16, b"\0"), target.ljust(16, b"\0"))
    return (state, uid, inode) if ports_and_addresses == expected else None


def _look_up(theirs: tuple[_Ip, int], ours: tuple[_Ip, int]) -> _SocketEntry | None:
    """Find the entry like `_ask_kernel`, in the table in /proc."""
    for family in _families(theirs[0]):
        expected = [_shown(_packed(ip, family), port) for ip, port in (theirs, ours)]
        for fields in _rows(family):
            if fields[1:3] == expected:
                return int(fields[3], 16), int(fields[7]), int(fields[9])
    return None


def _rows(family: int) -> Iterator[list[str]]:
    """Yield the fields of each socket in the kernel's table in /proc: 1 and 2 are the
    addresses."""
    path = "/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6"
    try:
        with open(path, encoding="ascii") as file:
            yield from (line.split() for line in file)
    except OSError:
        return


def _shown(address: bytes, port: int) -> str:
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


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
