"""Who a request is of, where callers take turns: its key's holder, else who is connected.

A user over a Unix socket, an address over TCP, as `max_caller_share` has it. A proxy is one caller,
whoever it relays for, unless these come with keys.
"""

from __future__ import annotations

import socket

from shmserve.core.keys import Key
from shmserve.core.scheduling.caller_number import UNKNOWN, caller_number
from shmserve.transport.peer_credentials import user_of

IN_ENVIRON = "shmserve.caller_number"  # of HTTP requests


def of_socket(sock: socket.socket) -> int:
    """The number of who is at the other end."""
    try:
        if sock.family == socket.AF_UNIX:
            return caller_number("user", str(user_of(sock)))
        return of_host(sock.getpeername()[0])
    except OSError:  # it has gone
        return UNKNOWN


def of_host(host: str) -> int:
    """The number of who comes from an address."""
    return caller_number("address", host)


def of_key(key: Key) -> int:
    """The number of a key's holder."""
    return caller_number("key", key.name)
