"""What is asked of a request once its route is known: the secret of the route's category, and
whether its caller may do what the route does. Every route is added with both."""

from __future__ import annotations

from typing import Any, NamedTuple

import falcon

from shmserve.errors import PermissionDenied
from shmserve.frontends.access import ACTION_OF, Access, Action
from shmserve.frontends.http.routes.callers import caller_of
from shmserve.frontends.oip.restricted_apis import Category, Restricted

HttpApp = falcon.App[falcon.Request, falcon.Response]
_READING = ("GET", "HEAD", "OPTIONS")


class RouteRule(NamedTuple):
    """What a route is. `action` None: that of its category, and to read is always to use."""

    category: Category
    action: Action | None = None


class Guard:
    """Refuses requests without the secret of their category, and callers who may not."""

    def __init__(self, restricted: Restricted, access: Access) -> None:
        self._restricted = restricted
        self._access = access
        self._closed = not access.open_to_all("change")
        self.rules: dict[str, RouteRule] = {}  # by the route's template

    def __bool__(self) -> bool:
        """Whether there is anything to refuse."""
        return bool(self._restricted) or self._closed

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
        self._restricted.check(rule.category, _Headers(req))
        action = rule.action
        if action is None and req.method not in _READING:
            action = ACTION_OF[rule.category]
        if action == "change" and self._closed:  # who registers what is for the coordinator to say
            self._access.check(action, caller_of(req.env))


class _Headers:
    def __init__(self, req: falcon.Request) -> None:
        self._req = req

    def get(self, name: str, /) -> str | None:
        return self._req.get_header(name)
