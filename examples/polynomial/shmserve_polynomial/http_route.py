"""GET /polynomial/{model}?x=3"""

import falcon

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.route_table import Routes
from shmserve_polynomial.one_number import value


class ValueResource:
    """Resource that answers with a polynomial's value."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings

    def on_get(self, req: falcon.Request, resp: falcon.Response, model: str) -> None:
        try:
            x = float(req.get_param("x", default=""))
        except ValueError:
            raise InvalidArgument("x must be a number") from None
        resp.media = {"y": value(self._dispatcher, self._settings, model, x)}


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    routes.add("inference", "/polynomial/{model}", ValueResource(dispatcher, settings))
