"""Users at the other end of local connections, as the kernel says.

A Unix socket tells the user (SO_PEERCRED). For a loopback TCP connection, the kernel's table of
sockets in this network namespace does: asked through sock_diag, or read from /proc/net/tcp where
sock_diag is not allowed.

Only a socket that a process holds counts (inode not 0): the rest of a closed connection is listed
as root's. The own socket must still be connected after the look, or the table may have told of a
later user of the same port.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

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
_ITS_STATES = (_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2)  # FIN_WAIT: the peer has only ended sending
_OUR_STATES = (_ESTABLISHED, _CLOSE_WAIT)
_TIMEOUT_S = 1.0


class SocketEntry(NamedTuple):
    """A row of the table."""

    state: int
    uid: int
    inode: int


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def user_of(sock: socket.socket) -> int:
    """Return the uid of the peer of a Unix socket. Raises OSError if the peer has gone."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def local_user_of(sock: socket.socket) -> int | None:
    """Return the uid of a connection's peer on this host. Return None if the peer has gone, or is
    not known to be on this host."""
    try:
        if sock.family == socket.AF_UNIX:
            return user_of(sock)
        peer = peer_of(sock)
    except OSError:
        return None
    return None if peer is None else peer.uid


def peer_of(sock: socket.socket) -> SocketEntry | None:
    """Return the entry of the socket at the other end of a loopback TCP connection. Return None for
    every other socket, and if no process holds the other end. Raise OSError if the peer has gone.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    entry = entry_of(sock.getpeername(), sock.getsockname())
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return entry if state in _OUR_STATES else None


def entry_of(peer: tuple[object, ...], own: tuple[object, ...]) -> SocketEntry | None:
    """Return the entry of the socket at `peer`, connected to `own`, as `peer_of`. Addresses are
    (host, port)."""
    theirs, ours = _address(peer), _address(own)
    if theirs is None or ours is None or not theirs[0].is_loopback:
        return None
    entry = _ask_kernel(theirs, ours) or _look_up(theirs, ours)
    held = entry is not None and entry.state in _ITS_STATES and entry.inode
    return entry if held else None


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


def _ask_kernel(theirs: tuple[_Ip, int], ours: tuple[_Ip, int]) -> SocketEntry | None:
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
) -> SocketEntry | None:
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
    return SocketEntry(state, uid, inode) if ports_and_addresses == expected else None


def _look_up(theirs: tuple[_Ip, int], ours: tuple[_Ip, int]) -> SocketEntry | None:
    """Find the entry like `_ask_kernel`, in the table in /proc."""
    for family in _families(theirs[0]):
        expected = [_shown(_packed(ip, family), port) for ip, port in (theirs, ours)]
        for fields in _rows(family):
            if fields[1:3] == expected:
                return SocketEntry(int(fields[3], 16), int(fields[7]), int(fields[9]))
    return None


def _rows(family: int) -> Iterator[list[str]]:
    """Yield the fields of each socket in the kernel's table in /proc: 1 and 2 are the addresses."""
    path = "/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6"
    try:
        with open(path, encoding="ascii") as file:
            yield from (line.split() for line in file)
    except OSError:
        return


def _shown(address: bytes, port: int) -> str:
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
