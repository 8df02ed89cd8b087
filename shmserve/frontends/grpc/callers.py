"""Who a call comes from, as the kernel says.

gRPC tells no more than the client's address, so each look is at what is connected now: it
counts only if it is unambiguous and the call's connection is still there afterwards.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from urllib.parse import unquote

import grpc

from shmserve.core.regions.region_book import Caller
from shmserve.frontends.grpc.listeners import Bind
from shmserve.transport import peer_credentials as peers
from shmserve.transport.peer_credentials import REMOTE

Address = tuple[str, int]
_ANY = ("0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "::1")


class Callers:
    """`private`: only the server's own user can connect to the Unix sockets. The kernel knows
    who is at the other end of one, but gRPC does not say which one a call came over."""

    def __init__(self, binds: Iterable[Bind], private: bool) -> None:
        self._local = Caller(os.geteuid()) if private else REMOTE
        self._listens = [pair for bind in binds if not bind.path for pair in _resolved(bind)]

    def of(self, context: grpc.ServicerContext) -> Caller:
        """The caller of a call."""
        scheme, _, rest = context.peer().partition(":")
        if scheme == "unix":
            return self._local
        host, _, port = unquote(rest).rpartition(":")
        if not port.isdecimal():
            return REMOTE
        client = (host.removeprefix("[").removesuffix("]"), int(port))
        # The same client address may be connected to several of ours, for several users.
        found = {peers.of_addresses(client, server) for server in self._servers(client[0])}
        found.discard(REMOTE)
        users = {caller.uid for caller in found}
        if len(users) != 1 or not context.is_active():
            return REMOTE
        return found.pop() if len(found) == 1 else Caller(users.pop())

    def _servers(self, client: str) -> set[Address]:
        """Where on our side a connection of this client may end."""
        hosts = {*_LOOPBACK, client}
        return {
            (own, port)
            for host, port in self._listens
            for own in (hosts if host in _ANY else (host,))
        }


def _resolved(bind: Bind) -> list[Address]:
    found = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)
    return [(str(address[0]), int(address[1])) for *_, address in found]
