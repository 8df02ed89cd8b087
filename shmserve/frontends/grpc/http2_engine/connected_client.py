"""Connected clients: address, caller number and credentials of a connection's peer."""

import socket

from shmserve.core.caller import Caller
from shmserve.frontends.caller_numbers import of_socket
from shmserve.transport.trust.peer_credentials import caller_of


class ConnectedClient:
    """The client of a connection, as reported by the kernel. `address`: address for people, in
    gRPC's notation. `unix`: True if connected over a Unix socket. `number`: caller number, for
    turns and shares of connections and calls."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._caller: Caller | None = None
        self.unix = sock.family == socket.AF_UNIX
        self.address = _address(sock)
        self.number = of_socket(sock)

    def caller(self) -> Caller:
        """Return user and process of the client, looked up at the first call. For any thread."""
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
