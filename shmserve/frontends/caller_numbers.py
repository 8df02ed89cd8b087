"""Caller numbers of requests, by which callers take turns and have shares.

A request's caller is the holder of the request's key, else the connected client: a user over a
Unix socket, an address over TCP. All users of one host share the host's address. A proxy counts as
one caller, unless the relayed requests bring keys or the proxy sends client addresses by PROXY
protocol.
"""

import socket
from ipaddress import IPv6Address, IPv6Network

from shmserve.core.caller import UNKNOWN_CALLER, caller_number
from shmserve.core.keys import Key
from shmserve.transport.trust.local_peers import user_of

# in WSGI environs of this project's HTTP server; other servers do not set the key
IN_ENVIRON = "shmserve.caller_number"
_NETWORK_BITS = 64  # smallest network of an IPv6 user, who may choose any address in the network


def of_socket(sock: socket.socket) -> int:
    """Return the caller number of a socket's peer; `UNKNOWN_CALLER` if the peer has gone."""
    try:
        if sock.family == socket.AF_UNIX:
            return caller_number("user", str(user_of(sock)))
        return of_host(sock.getpeername()[0])
    except OSError:  # the peer has disconnected
        return UNKNOWN_CALLER


def of_host(host: str) -> int:
    """Return the caller number of an address: for IPv6 of its 64-bit network. Return
    `UNKNOWN_CALLER` for an empty address."""
    if not host:
        return UNKNOWN_CALLER
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
    """Return the caller number of a key's holder."""
    return caller_number("key", key.name)
