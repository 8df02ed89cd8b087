"""Who a call comes from, as the kernel says.

The `grpcio` library tells no more than the client's address, so each look is at what is connected
now: it counts only if it is unambiguous and the call's connection is still there afterwards.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import unquote

from msgspec.structs import replace

from shmserve.core.access import Access, Action
from shmserve.core.keys import HEADER
from shmserve.core.regions.region_book import Caller
from shmserve.frontends import caller_numbers
from shmserve.frontends.access import ACTION_OF, RELAYED
from shmserve.frontends.deciding_fields import refuse_alike
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.presented_keys import PresentedKeys
from shmserve.transport import peer_credentials
from shmserve.transport.listen_addresses import ListenAddress
from shmserve.transport.peer_credentials import REMOTE

_log = logging.getLogger("shmserve.grpc")

Address = tuple[str, int]
_ANY = ("0.0.0.0", "::")


class Callers(Protocol):
    """Knows callers, as the engine can."""

    def of(self, context: RpcContext) -> Caller:
        """The caller of a call."""
        ...


def relayed(context: RpcContext) -> bool:
    """Whether a proxy says that it passes on somebody else's call."""
    return any(key in RELAYED for key, _ in context.invocation_metadata())


class AddressCallers:
    """`private`: only the server's own user can connect to the Unix sockets. The kernel knows
    who is at the other end of one, but gRPC does not say which one a call came over."""

    def __init__(self, binds: Iterable[ListenAddress], private: bool) -> None:
        self._local = Caller(os.geteuid()) if private else REMOTE
        self._listens = [pair for bind in binds if not bind.path for pair in _resolved(bind)]

    def of(self, context: RpcContext) -> Caller:
        """The caller of a call; nobody known if it is relayed for somebody else."""
        if relayed(context):
            return REMOTE
        scheme, _, rest = context.peer().partition(":")
        if scheme == "unix":
            return self._local
        host, _, port = unquote(rest).rpartition(":")
        if not port.isdecimal():
            return REMOTE
        client = (host.removeprefix("[").removesuffix("]"), int(port))
        # The same client address may be connected to several of ours, for several users.
        callers = {
            peer_credentials.of_addresses(client, server) for server in self._servers(client)
        }
        callers.discard(REMOTE)
        users = {caller.uid for caller in callers}
        if len(users) != 1 or not context.is_active():
            return REMOTE
        return callers.pop() if len(callers) == 1 else Caller(users.pop())

    def _servers(self, client: Address) -> set[Address]:
        """Where on our side a connection of this client may end: all of them, whichever of this
        host's addresses they lead to, or another user's could be taken for it."""
        anywhere = {port for host, port in self._listens if host in _ANY}
        servers = {(host, port) for host, port in self._listens if host not in _ANY}
        if anywhere:
            found = peer_credentials.servers_of(client)
            servers |= {(host, port) for host, port in found if port in anywhere}
        return servers


class KeyedCallers:
    """Callers with the scopes of the keys that their calls came with."""

    def __init__(self, callers: Callers, keys: PresentedKeys) -> None:
        self._callers = callers
        self._keys = keys

    def of(self, context: RpcContext) -> Caller:
        """The caller of a call."""
        caller = self._callers.of(context)
        _, key = self._keys.find(_field_of(context))
        return replace(caller, scopes=key.scopes) if key is not None else caller


class CallAccess:
    """Whether the caller of a call may do something, by himself or with his key.

    Attributes:
        keyed: there are keys, so calls have to be let in with `admit`.
    """

    def __init__(self, access: Access, callers: Callers, keys: PresentedKeys) -> None:
        self.access = access
        self.callers = KeyedCallers(callers, keys) if keys else callers
        self._keys = keys
        self.keyed = bool(keys)

    def admit(self, category: Category, context: RpcContext) -> None:
        """Count whose key a call came with; let it begin, or not, if it is of a category that is
        for use only. Probes of health have no key.

        Raises:
            Unauthenticated, PermissionDenied: as `check`.
        """
        _, key = self._keys.holder(_field_of(context))
        if key is not None:
            context.caller_number = caller_numbers.of_key(key)
        if ACTION_OF[category] == "use" and category != "health":
            self.check("use", context)

    def key_field(self, context: RpcContext) -> str:
        """The metadata key that a call's key came in, which is for no model; empty: none did."""
        field, key = self._keys.find(_field_of(context))
        return field if key is not None or field == HEADER else ""

    def check(self, action: Action, context: RpcContext) -> None:
        """Let it be done, or not.

        Raises:
            Unauthenticated: not without a key.
            PermissionDenied: this caller may not.
        """
        if not self.access.asked_at_the_door(action):
            return
        _, key = self._keys.find(_field_of(context))
        if key is None or action not in key.scopes:
            self.access.check(action, self.callers.of(context))
        elif action != "use":
            _log.info("key %s: %s", key.name, action)


def _field_of(context: RpcContext) -> Callable[[str], str | None]:
    """Gives a call's metadata by name; of several the first."""

    def field(name: str) -> str | None:
        metadata = [*context.invocation_metadata()]
        refuse_alike(name, [key for key, _ in metadata])
        values = (v for k, v in metadata if k == name)
        return next((value for value in values if isinstance(value, str)), None)

    return field


def _resolved(bind: ListenAddress) -> list[Address]:
    addresses = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)
    return [(str(address[0]), int(address[1])) for *_, address in addresses]
