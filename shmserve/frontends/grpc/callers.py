"""Callers of gRPC calls: the user at the connection's other end, and the key of the call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from shmserve.core.access import Access, Action
from shmserve.core.caller import Caller
from shmserve.core.keys import HEADER
from shmserve.frontends import caller_numbers
from shmserve.frontends.deciding_fields import refuse_alike
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.origins import ACTION_OF, RELAYED
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.presented_keys import PresentedKeys

_log = logging.getLogger("shmserve.grpc")


class Callers(Protocol):
    """Finds the caller of a call, as far as the engine knows the caller."""

    def of(self, context: RpcContext) -> Caller:
        """Return the caller of a call."""
        ...


def relayed(context: RpcContext) -> bool:
    """Return True if the metadata shows that a proxy relays another client's call."""
    return any(key in RELAYED for key, _ in context.invocation_metadata())


class KeyedCallers:
    """Callers with the scopes of the keys in their calls' metadata."""

    def __init__(self, callers: Callers, keys: PresentedKeys) -> None:
        self._callers = callers
        self._keys = keys

    def of(self, context: RpcContext) -> Caller:
        """Return the caller of a call, with the scopes of the call's key."""
        caller = self._callers.of(context)
        _, key = self._keys.find(_field_of(context))
        return replace(caller, scopes=key.scopes) if key is not None else caller


class CallAccess:
    """Permissions of callers, by their user or by the key of the call.

    Attributes:
        keyed: True if keys are configured, so every call must pass `admit`.
    """

    def __init__(self, access: Access, callers: Callers, keys: PresentedKeys) -> None:
        self.access = access
        self.callers = KeyedCallers(callers, keys) if keys else callers
        self._keys = keys
        self.keyed = bool(keys)

    def admit(self, category: Category, context: RpcContext) -> None:
        """Count the call's key, and take the key's holder as the caller for turns and shares.
        Check the permission "use" for categories that need only this permission; health probes
        need no key.

        Raises:
            Unauthenticated, PermissionDenied: as `check`.
        """
        _, key = self._keys.holder(_field_of(context))
        if key is not None:
            context.caller_number = caller_numbers.of_key(key)
        if ACTION_OF[category] == "use" and category != "health":
            self.check("use", context)

    def key_field(self, context: RpcContext) -> str:
        """Return the name of the metadata field with the call's key, which no model may see; empty
        without a key."""
        field, key = self._keys.find(_field_of(context))
        return field if key is not None or field == HEADER else ""

    def check(self, action: Action, context: RpcContext) -> None:
        """Check that the caller of a call may perform an action.

        Raises:
            Unauthenticated: the action needs a key.
            PermissionDenied: the caller may not perform the action.
        """
        if not self.access.asked_at_the_door(action):
            return
        _, key = self._keys.find(_field_of(context))
        if key is None or action not in key.scopes:
            self.access.check(action, self.callers.of(context))
        elif action != "use":
            _log.info("key %s: %s", key.name, action)


def _field_of(context: RpcContext) -> Callable[[str], str | None]:
    """Return a function that returns a call's metadata by name: the first text value."""

    def field(name: str) -> str | None:
        metadata = [*context.invocation_metadata()]
        refuse_alike(name, [key for key, _ in metadata])
        values = (v for k, v in metadata if k == name)
        return next((value for value in values if isinstance(value, str)), None)

    return field
