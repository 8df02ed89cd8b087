"""Who a call comes from: the user at the other end of its connection, and the key it brings."""

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
    """Knows callers, as the engine can."""

    def of(self, context: RpcContext) -> Caller:
        """The caller of a call."""
        ...


def relayed(context: RpcContext) -> bool:
    """Whether a proxy says that it passes on somebody else's call."""
    return any(key in RELAYED for key, _ in context.invocation_metadata())


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
