"""Who a request is of, where callers take turns and have shares: its key's holder, else who is
connected.

A user over a Unix socket, an address over TCP, whichever of this host's users comes from it. A
proxy is one caller, whoever it relays for, unless these come with keys, or it tells their addresses
by PROXY protocol.
"""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, IPv6Network

from shmserve.core.keys import Key
from shmserve.core.scheduling.caller_number import UNKNOWN, caller_number
from shmserve.transport.trust.peer_credentials import user_of

IN_ENVIRON = "shmserve.caller_number"  # of HTTP requests; other servers than ours do not set it
_NETWORK_BITS = 64  # what somebody with IPv6 has at least, and may choose addresses from


def of_socket(sock: socket.socket) -> int:
    """The number of who is at the other end."""
    try:
        if sock.family == socket.AF_UNIX:
            return caller_number("user", str(user_of(sock)))
        return of_host(sock.getpeername()[0])
    except OSError:  # it has gone
        return UNKNOWN


def of_host(host: str) -> int:
    """The number of who comes from an address, with IPv6 from a network of 64 bits; `UNKNOWN`
    without one."""
    if not host:
        return UNKNOWN
    return caller_number("address", _network_of(host) if ":" in host else host)


def _network_of(host: str) -> str:
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), _NETWORK_BITS), strict=False))


def of_key(key: Key) -> int:
    """The number of a key's holder."""
    return caller_number("key", key.name)
