"""Check of requests after routing: the secret of the route's category, and the caller's right to
the route's action.

Callers have rights of their own or through a key. Every route is added with category and action.
"""

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
    """Category and action of a route. If `action` is None, reading is "use" and other methods have
    the action of the category. `asks_itself`: the route checks the caller's right to the action."""

    category: Category
    action: Action | None = None
    asks_itself: bool = False

    def action_of(self, method: str) -> Action:
        """Return the action of requests with a method."""
        return self.action or ("use" if method in _READING else ACTION_OF[self.category])


class Guard:
    """Middleware that refuses requests without the secret of their category or without the right to
    the action. False if there is nothing to refuse or count. `rules`: rules of all routes, by
    template."""

    def __init__(self, restricted: Restricted, access: Access, keys: PresentedKeys) -> None:
        self._restricted = restricted
        self._access = access
        self._keys = keys
        self._closed = frozenset(filter(access.asked_at_the_door, ACTIONS)) - {"send models"}
        self.rules: dict[str, RouteRule] = {}

    def __bool__(self) -> bool:
        return bool(self._restricted or self._closed or self._keys)

    def infers(self, template: str) -> bool:
        """Return True if the route runs models."""
        rule = self.rules.get(template)
        return rule is not None and rule.category == "inference"

    def action_of(self, req: falcon.Request, template: str | None) -> Action:
        """Return the action of a request to the route with a template. Requests without a route
        have the action "use"."""
        rule = self.rules.get(template or "")
        return "use" if rule is None else rule.action_of(req.method)

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: Any, params: dict[str, Any]
    ) -> None:
        """Check a request after routing, before its body is read. Falcon calls this method."""
        rule = self.rules.get(req.uri_template or "")
        if rule is None:  # the route was added to Falcon without a rule
            raise PermissionDenied("This API is restricted")
        self.check(rule, req)

    def check(self, rule: RouteRule, req: falcon.Request) -> None:
        """Check a request against a rule; called directly for requests answered without a route.
        Raise PermissionDenied if the secret is missing or wrong, or the caller lacks the right.
        Raise Unauthenticated if the action needs a key."""
        self._restricted.check(rule.category, HeaderFields(req.env))
        key = self._holder(req) if self._keys else None
        action = rule.action_of(req.method)
        if action not in self._closed or (action == "use" and rule.category == "health"):
            return  # health probes have no key
        if rule.asks_itself:
            return
        self._access.check(action, caller_of(req.env))
        if key is not None and action != "use":
            # a kind of line for each key (`observe.line_limit`)
            log.info(f"key {key.name}: %s %s", req.method, req.uri_template or "")

    def _holder(self, req: falcon.Request) -> Key | None:
        """Return the request's valid key, if any. Remove the key's field from the environ, so that
        models and forwarded parameters never contain the key."""
        field, key = self._keys.holder(HeaderFields(req.env).get)
        if field:
            req.env[KEY] = key
        if key is not None:
            req.env[IN_ENVIRON] = of_key(key)
        if key is not None or field == HEADER:
            del req.env[f"HTTP_{field.upper().replace('-', '_')}"]
        return key
