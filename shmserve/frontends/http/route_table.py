"""Registration of routes in the HTTP application, by the server and by extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol

import falcon
from falcon.routing import BaseConverter

from shmserve import extensions
from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import openapi
from shmserve.frontends.http.blocking_routes import BlockingRoutes
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.origin_check import OriginCheck
from shmserve.frontends.http.restricted_api import Guard, HttpApp, RouteRule
from shmserve.frontends.oip.restricted_apis import Category, known

Responder = Callable[[falcon.Request, falcon.Response], None]
Finder = Callable[[falcon.Request], Responder | None]
# Paths of a model without and with a version. A version in the path must not be empty (`Given`).
MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version:given}")
_MAX_DIGITS = 18  # versions are positive 64-bit numbers


class Given(BaseConverter):
    """Converter of a path variable: a path in which the variable is empty does not match."""

    def convert(self, value: str) -> str | None:
        return value or None


class Get:
    """A resource that answers GET and HEAD with `respond`, which also gets the path's variables."""

    def __init__(self, respond: Callable[..., None]) -> None:
        self.on_get = self.on_head = respond


class App(HttpApp):
    """Application of Falcon that also lists the templates of its routes.

    `falcon.inspect` lists templates as well, but reads the source code of every resource for that.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.templates: list[str] = []

    def add_route(self, uri_template: str, resource: object, **options: Any) -> None:
        self.templates.append(uri_template)
        super().add_route(uri_template, resource, **options)


class Routes:
    """Table of the application's routes. Each route has a category of the restricted APIs."""

    def __init__(self, app: App, guard: Guard, origins: OriginCheck, errors: ErrorHandlers) -> None:
        self._app = app
        self._guard = guard
        self._pages = origins.pages
        self._errors = errors
        # runs routes that may block; None: no route of this table may block
        self._blocking: BlockingRoutes | None = None
        self._finders: list[tuple[Category, Finder]] = []
        self._operations: dict[str, openapi.Operation] = {}

    def for_extensions(self, settings: Settings) -> Routes:
        """Return a view of the same table for extensions. Routes added through the view may block
        unless declared otherwise. The server's own routes never block."""
        routes = copy(self)
        routes._blocking = BlockingRoutes(settings)
        return routes

    def add(
        self,
        category: Category,
        template: str,
        resource: object,
        suffix: str | None = None,
        action: Action | None = None,
        never_blocks: bool = False,
        asks_itself: bool = False,
    ) -> None:
        """Add a route, such as ``/v2/models/{name}/infer``.

        Args:
            category: category of the restricted APIs.
            template: the path.
            resource: Falcon's resource that answers.
            suffix: suffix of the responders' names, as in `on_get_suffix`.
            action: the requests' action (`frontends.oip.origins`), if different from the
                category's action and from "use" for reading.
            never_blocks: for extensions: the responders wait for nothing but the `dispatcher` and
                the request's body, and hand long work to `waiting.beside`. Such responders run on
                the loop that serves all connections of the worker, which saves a thread.
            asks_itself: the responders check the caller's right to the action.

        Raises:
            ValueError: the category does not exist, or the route exists already.
        """
        known_category = known(category, f"route {template}")
        self._guard.rules[template] = RouteRule(known_category, action, asks_itself)
        if self._blocking is not None and not never_blocks:
            resource = self._blocking.resource(resource)
        self._app.add_route(template, resource, suffix=suffix)

    def add_behind(self, category: Category, find: Finder, never_blocks: bool = False) -> None:
        """Add a finder for requests that match no route. `find` returns the responder of a
        request, or None. `never_blocks` is explained in `add`, and covers finder and responder.
        Raise ValueError if the category does not exist."""
        if self._blocking is not None and not never_blocks:
            find = self._blocking.finder(find)
        self._finders.append((known(category, "requests without a route"), find))

    def add_page(
        self, category: Category, path: str, resource: object, never_blocks: bool = False
    ) -> None:
        """Add a page for people, like `add`. Links on other sites may open the page."""
        self.add(category, path, resource, never_blocks=never_blocks)
        self._pages.add(path)

    def describe(self, operations: Mapping[str, openapi.Operation]) -> None:
        """Set the descriptions of routes in the OpenAPI document, by method and path, as in ``GET
        /v2/models/{name}``. A route without a description appears with method and path as
        summary."""
        self._operations.update(operations)

    def table(self) -> list[openapi.Route]:
        """Return all routes, each with the methods for which it has responders."""
        from falcon import inspect  # slow to import, and rarely needed

        routes = []
        for route in inspect.inspect_routes(self._app):
            rule = self._guard.rules[route.path]
            methods = [method.method for method in route.methods if not method.internal]
            operations = openapi.described(route.path, methods, self._operations)
            actions = {method: rule.action_of(method) for method in methods}
            path = openapi.plain(route.path)
            routes.append(openapi.Route(path, rule.category, operations, actions))
        return routes

    def errors_as(self, prefix: str, encode: Callable[[str, int], bytes]) -> None:
        """Use another error body for paths with a prefix: `encode` makes the JSON from message and
        status."""
        self._errors.forms.append((prefix, encode))

    def finish(self) -> None:
        """Install the finders. No route is added after this call. Raise ValueError if a route was
        not added through this table."""
        self._app.add_sink(self._behind, r"/")
        for template in self._app.templates:
            if template not in self._guard.rules:
                raise ValueError(f"route {template} has no category of the restricted APIs")

    def _behind(self, req: falcon.Request, resp: falcon.Response, **_: str) -> None:
        for category, find in self._finders:
            respond = find(req)
            if respond is not None:
                self._guard.check(RouteRule(category), req)
                return respond(req, resp)
        raise falcon.HTTPRouteNotFound


class HttpExtension(Protocol):
    """An extension of the group `extensions.HTTP_ROUTES`, which adds routes.

    Each HTTP worker calls the extension once: after adding the server's own routes and before
    taking requests. A responder runs in a thread beside the worker's loop and may block. Requests
    share `http_threads` such threads. So several threads may call a resource at a time, and
    different threads may ask for the pieces of one stream. While all threads are busy, a request
    waits `request_timeout_s` for a thread and is then answered 503. Routes added with
    `never_blocks=True` run on the loop itself.

    Errors of `shmserve.errors` raised by responders are answered with their status and text. Any
    other exception is answered 500 without a text and logged with a traceback.
    """

    def __call__(self, routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
        """Add routes. An exception raised here keeps the worker from starting.

        Args:
            routes: table for the routes.
            dispatcher: the way to the models; outlives the application.
            settings: all settings; `Settings.extension` has the extension's own.
        """
        ...


def add_extensions(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the routes of all extensions."""
    routes = routes.for_extensions(settings)
    for extension in extensions.load_all(extensions.HTTP_ROUTES).values():
        extension(routes, dispatcher, settings)


def checked_version(version: str) -> str:
    """Return the version in a path, in the registry's form; "" if the path has no version. Raise
    NotFound if the version is no number, since no such path exists."""
    if not version:
        return ""
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        raise NotFound("Not Found")
    return str(int(version))
