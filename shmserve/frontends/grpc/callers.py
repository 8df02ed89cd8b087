"""Callers of gRPC calls: the user at the connection's other end, and the key of the call."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from shmserve.core.access import Access, Action
from shmserve.core.caller import Caller
from shmserve.core.keys import HEADER, with_key
from shmserve.frontends import caller_numbers
from shmserve.frontends.deciding_fields import refuse_alike
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.forwarded_fields import forwarded
from shmserve.frontends.oip.origins import ACTION_OF, RELAYED
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.presented_keys import PresentedKeys

_log = logging.getLogger("shmserve.grpc")


FindCaller = Callable[[RpcContext], Caller]
"""Returns the caller of a call, as far as the engine knows the caller."""


def relayed(context: RpcContext) -> bool:
    """Return True if the metadata shows that a proxy relays another client's call."""
    return any(key in RELAYED for key, _ in context.invocation_metadata())


class CallAccess:
    """Permissions of callers, by their user or by the key of the call. `caller`: returns the caller
    of a call, with name and scopes of the call's key. `keyed`: True if keys are configured, so
    every call must pass `admit`."""

    def __init__(self, access: Access, find: FindCaller, keys: PresentedKeys) -> None:
        self.access = access
        self._find = find
        self.caller: FindCaller = self._keyed_caller if keys else find
        self._keys = keys
        self.keyed = bool(keys)

    def _keyed_caller(self, context: RpcContext) -> Caller:
        caller = self._find(context)
        field, key = self._keys.find(_field_of(context))
        return with_key(caller, key) if field else caller

    def admit(self, category: Category, context: RpcContext) -> None:
        """Count the call's key, and take the key's holder as the caller for turns and shares. Check
        the permission "use" for categories that need only this permission; health probes need no
        key. Raise Unauthenticated or PermissionDenied as `check` does."""
        _, key = self._keys.holder(_field_of(context))
        if key is not None:
            context.caller_number = caller_numbers.of_key(key)
        if ACTION_OF[category] == "use" and category != "health":
            self.check("use", context)

    def forwarded_metadata(self, pattern: re.Pattern[str], context: RpcContext) -> dict[str, str]:
        """Return a call's text metadata that match `pattern`, as parameters. No model may see the
        call's key. Raise InvalidArgument as `forwarded_fields.forwarded` does."""
        field, key = self._keys.find(_field_of(context))
        hidden = field if key is not None or field == HEADER else ""
        metadata = context.invocation_metadata()
        fields = ((k, v) for k, v in metadata if isinstance(v, str) and k != hidden)
        return forwarded(pattern, fields)

    def check(self, action: Action, context: RpcContext) -> None:
        """Check that the caller of a call may perform an action. Raise Unauthenticated if the
        action needs a key. Raise PermissionDenied if the caller may not perform the action."""
        if not self.access.asked_at_the_door(action):
            return
        _, key = self._keys.find(_field_of(context))
        if key is None or action not in key.scopes:
            self.access.check(action, self.caller(context))
        elif action != "use":
            _log.info(f"key {key.name}: %s", action)  # a kind of line for each key


def _field_of(context: RpcContext) -> Callable[[str], str | None]:
    """Return a function that returns a call's metadata by name: the first text value."""

    def field(name: str) -> str | None:
        metadata = [*context.invocation_metadata()]
        refuse_alike(name, [key for key, _ in metadata])
        values = (v for k, v in metadata if k == name)
        return next((value for value in values if isinstance(value, str)), None)

    return field
