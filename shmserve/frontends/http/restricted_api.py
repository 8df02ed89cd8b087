"""What is asked of a request once its route is known: the secret of the route's category, and
whether its caller may do what the route does, by himself or with his key. Every route is added
with both."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import falcon

from shmserve.core.access import ACTIONS, Access, Action
from shmserve.core.keys import HEADER, Key
from shmserve.errors import PermissionDenied
from shmserve.frontends.caller_numbers import IN_ENVIRON, of_key
from shmserve.frontends.http.request_caller import KEY, caller_of
from shmserve.frontends.http.server.header_fields import HeaderFields
from shmserve.frontends.oip.origins import ACTION_OF
from shmserve.frontends.oip.restricted_apis import Category, Restricted
from shmserve.frontends.presented_keys import PresentedKeys

log = logging.getLogger("shmserve.http")

HttpApp = falcon.App[falcon.Request, falcon.Response]
_READING = ("GET", "HEAD", "OPTIONS")


class RouteRule(NamedTuple):
    """What a route is. `action` None: that of its category, and to read is always to use."""

    category: Category
    action: Action | None = None


class Guard:
    """Refuses requests without the secret of their category, and callers who may not."""

    def __init__(self, restricted: Restricted, access: Access, keys: PresentedKeys) -> None:
        self._restricted = restricted
        self._access = access
        self._keys = keys
        self._closed = frozenset(filter(access.asked_at_the_door, ACTIONS)) - {"send models"}
        self.rules: dict[str, RouteRule] = {}  # by the route's template

    def __bool__(self) -> bool:
        """Whether there is anything to refuse."""
        return bool(self._restricted or self._closed or self._keys)

    def infers(self, template: str) -> bool:
        """Whether a route runs models."""
        rule = self.rules.get(template)
        return rule is not None and rule.category == "inference"

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: Any, params: dict[str, Any]
    ) -> None:
        """Called once the route is known, before the body is looked at."""
        rule = self.rules.get(req.uri_template or "")
        if rule is None:  # added behind our back
            raise PermissionDenied("This API is restricted")
        self.check(rule, req)

    def check(self, rule: RouteRule, req: falcon.Request) -> None:
        """The same for a request that no route takes."""
        self._restricted.check(rule.category, HeaderFields(req.env))
        key = self._holder(req) if self._keys else None
        action = rule.action
        if action is None:
            action = "use" if req.method in _READING else ACTION_OF[rule.category]
        if action not in self._closed or (action == "use" and rule.category == "health"):
            return  # probes of health have no key
        self._access.check(action, caller_of(req.env))
        if key is not None and action != "use":
            log.info("key %s: %s %s", key.name, req.method, req.uri_template or "")

    def _holder(self, req: falcon.Request) -> Key | None:
        """Whose key it came with. No model is to see that, nor what else is made of headers."""
        field, key = self._keys.holder(HeaderFields(req.env).get)
        if key is not None:
            req.env[KEY] = key
            req.env[IN_ENVIRON] = of_key(key)
        if key is not None or field == HEADER:
            del req.env[f"HTTP_{field.upper().replace('-', '_')}"]
        return key
