"""How routes are added to the HTTP application, by ourselves and by extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol

import falcon
from falcon.routing import BaseConverter

from shmserve import extensions
from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import openapi
from shmserve.frontends.http.blocking_routes import BlockingRoutes
from shmserve.frontends.http.error_handlers import ErrorHandlers
from shmserve.frontends.http.origin_check import OriginCheck
from shmserve.frontends.http.restricted_api import Guard, HttpApp, RouteRule
from shmserve.frontends.oip.restricted_apis import Category, known

Responder = Callable[[falcon.Request, falcon.Response], None]
Finder = Callable[[falcon.Request], Responder | None]
# A model's paths stand once without and once with a version, which is not empty then (`Given`)
MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version:given}")


class Given(BaseConverter):
    """A part of a path that must not be empty: without it the path is another one."""

    def convert(self, value: str) -> str | None:
        return value or None


class Get:
    """A resource whose GET and HEAD `respond` answers; it also gets the path's variables."""

    def __init__(self, respond: Callable[..., None]) -> None:
        self.on_get = self.on_head = respond


class App(HttpApp):
    """Falcon's application, and the templates of its routes. (`falcon.inspect` finds them as well,
    and reads the source of every resource for that.)"""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.templates: list[str] = []

    def add_route(self, uri_template: str, resource: object, **options: Any) -> None:
        self.templates.append(uri_template)
        super().add_route(uri_template, resource, **options)


class Routes:
    """Adds routes to the application; each with its category of the restricted APIs."""

    def __init__(self, app: App, guard: Guard, origins: OriginCheck, errors: ErrorHandlers) -> None:
        self._app = app
        self._guard = guard
        self._pages = origins.pages
        self._errors = errors
        self._blocking: BlockingRoutes | None = None  # what runs routes that may block
        self._finders: list[tuple[Category, Finder]] = []
        self._operations: dict[str, openapi.Operation] = {}

    def for_extensions(self, settings: Settings) -> Routes:
        """Return the same table for extensions, whose routes may block if they do not say
        otherwise. The server's own routes never do."""
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
    ) -> None:
        """A route, such as ``/v2/models/{name}/infer``, and Falcon's resource for it. `suffix`: of
        its responders' names, such as `on_get_suffix`.

        Args:
            category: of the restricted APIs.
            template: the path.
            resource: answers.
            action: what its requests do (`frontends.oip.origins`), where it is not what those of
                the category do and reading is not only that.
            never_blocks: for extensions: the responders wait for nothing but the `dispatcher` and
                the request's body, and hand long work to `waiting.beside`. They run on the loop
                that serves all connections of the worker, which saves a thread.

        Raises:
            ValueError: there is no such category, or there is such a route.
        """
        self._guard.rules[template] = RouteRule(known(category, f"route {template}"), action)
        if self._blocking is not None and not never_blocks:
            resource = self._blocking.resource(resource)
        self._app.add_route(template, resource, suffix=suffix)

    def add_behind(self, category: Category, find: Finder, never_blocks: bool = False) -> None:
        """What may answer requests that no route takes: `find` tells by which function, if at all.
        `never_blocks`, as in `add`, is about both.

        Raises:
            ValueError: there is no such category.
        """
        if self._blocking is not None and not never_blocks:
            find = self._blocking.finder(find)
        self._finders.append((known(category, "requests without a route"), find))

    def add_page(
        self, category: Category, path: str, resource: object, never_blocks: bool = False
    ) -> None:
        """As `add`, of a page for people: links from elsewhere may lead there."""
        self.add(category, path, resource, never_blocks=never_blocks)
        self._pages.add(path)

    def describe(self, operations: Mapping[str, openapi.Operation]) -> None:
        """What stands in the OpenAPI document about routes, by method and path, as in
        ``GET /v2/models/{name}``. Those that nobody describes are there by their bare names."""
        self._operations.update(operations)

    def table(self) -> list[openapi.Route]:
        """All routes, with the methods that they answer by themselves."""
        from falcon import inspect  # takes its time, and is needed where this is asked for only

        return [
            openapi.Route(
                openapi.plain(route.path),
                self._guard.rules[route.path].category,
                openapi.described(
                    route.path,
                    [method.method for method in route.methods if not method.internal],
                    self._operations,
                ),
            )
            for route in inspect.inspect_routes(self._app)
        ]

    def errors_as(self, prefix: str, encode: Callable[[str, int], bytes]) -> None:
        """Errors of paths that begin so have another body: `encode` makes the JSON of the message
        and the status."""
        self._errors.forms.append((prefix, encode))

    def finish(self) -> None:
        """Nothing is added any more.

        Raises:
            ValueError: there is a route that was not added here.
        """
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
    """An extension of the group `extensions.HTTP_ROUTES`: adds its routes.

    Called once in each HTTP worker, after the server's own routes were added and before it takes
    requests. A responder runs in a thread beside the worker's loop and may block; of `http_threads`
    such threads none is anybody's own, so resources must bear being called by several at a time,
    and a stream's pieces may be asked for by one thread after the other. While all of them are
    busy, requests wait `request_timeout_s` for one and are then told 503. Routes that are added
    with `never_blocks=True` run on the loop itself.

    What responders raise of `shmserve.errors` becomes an answer with its status and text; anything
    else becomes a 500 without one, and a traceback in the log.
    """

    def __call__(self, routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
        """Add routes. What is raised here keeps the worker from starting.

        Args:
            routes: takes them.
            dispatcher: the way to the models; it outlives the application.
            settings: all settings; `Settings.extension` has the extension's own.
        """
        ...


def add_extensions(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """The routes of all extensions.

    Raises:
        ConfigError: one cannot be imported.
    """
    routes = routes.for_extensions(settings)
    for extension in extensions.load_all(extensions.HTTP_ROUTES).values():
        extension(routes, dispatcher, settings)
