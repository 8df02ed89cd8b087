"""Who is at the other end of a connection."""

from __future__ import annotations

import socket

from shmserve.core.caller import Caller
from shmserve.frontends.caller_numbers import of_socket
from shmserve.transport.trust.peer_credentials import caller_of


class ConnectedClient:
    """A connection's client, as the kernel tells it.

    Attributes:
        address: for people, as gRPC writes addresses.
        unix: it came over a Unix socket.
        number: whose its connections and calls are, where callers take turns and have shares.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._caller: Caller | None = None
        self.unix = sock.family == socket.AF_UNIX
        self.address = _address(sock)
        self.number = of_socket(sock)

    def caller(self) -> Caller:
        """Whose process it is, looked up when first asked. For any thread."""
        if self._caller is None:
            self._caller = caller_of(self._sock)
        return self._caller


def _address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "unix:"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
