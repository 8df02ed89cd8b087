"""The OpenAPI document against the existing routes and the routes' answers."""

import re
from typing import Any

import falcon.testing
import pytest
from falcon import inspect
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from shmserve.config import Settings
from shmserve.frontends.http.routes.api_document import OPERATIONS
from shmserve.frontends.http.routes.application import create_app
from shmserve.grps.frontend.http import grps_routes
from tests import fake_models


class Client(falcon.testing.TestClient):
    """The real application with fake models."""

    def __init__(self, **settings: Any) -> None:
        app = create_app(fake_models.dispatcher(), Settings(**settings))  # type: ignore[arg-type]
        super().__init__(app, headers={"Host": "localhost"})

    def document(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.simulate_get("/openapi.json").json
        return answer


@pytest.fixture(scope="module")
def client():
    return Client()


@pytest.fixture(scope="module")
def document(client):
    return client.document()


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    operations = [one for path in document["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations if isinstance(one, dict)]
    assert len(names) == len(set(names))


def test_it_has_the_routes_and_methods_that_are_there(client, document) -> None:
    there = {
        (re.sub(r":\w+\}", "}", route.path), method.method.lower())
        for route in inspect.inspect_routes(client.app)
        for method in route.methods
        if not method.internal
    }
    told = {
        (path, method)
        for path, methods in document["paths"].items()
        for method in methods.keys() - {"parameters"}
    }
    assert told == there


def test_every_route_of_ours_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    summaries = {
        f"{method.upper()} {path}": one["summary"]
        for path, methods in document["paths"].items()
        for method, one in methods.items()
        if method != "parameters"
    }
    assert not [name for name, text in summaries.items() if text.startswith(("GET /", "POST /"))]
    assert OPERATIONS.keys() | grps_routes.OPERATIONS.keys() <= summaries.keys()


def test_what_is_switched_off_is_not_in_it() -> None:
    paths = Client(metrics=False, dashboard=False).document()["paths"]
    assert "/v2" in paths
    assert not {"/metrics", "/", "/monitor/data"} & paths.keys()


def test_it_is_read_as_metadata_is() -> None:
    closed = Client(http_restricted_api=("metadata:who=me",))
    assert closed.simulate_get("/openapi.json").status_code == 403
    assert closed.simulate_get("/openapi.json", headers={"who": "me"}).status_code == 200


def test_examples_are_bodies_as_their_schemas_have_them(document: dict[str, Any]) -> None:
    found = 0
    for operation in (one.get("post", {}) for one in document["paths"].values()):
        body = operation.get("requestBody", {"content": {}})["content"].get("application/json", {})
        if "example" in body:
            schema = body["schema"] | {"components": document["components"]}
            Draft202012Validator(schema).validate(body["example"])
            found += 1
    assert found >= 5


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("get", "/v2/models/{name}", "use"),
        ("post", "/v2/models/{name}/infer", "use"),
        ("get", "/v2/logging", "use"),
        ("post", "/v2/logging", "change"),
        ("get", "/grps/v1/health/offline", "change"),  # not every GET only reads
        ("post", "/v2/systemsharedmemory/region/{name}/register", "register"),
    ],
)
def test_an_operation_names_the_right_that_it_needs(document, method, path, action) -> None:
    assert document["paths"][path][method]["x-action"] == action


VECTOR = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}
ANSWERS = {
    "get": (
        *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/logging"),
        *(f"/v2/models/identity{what}" for what in ("", "/ready", "/config", "/trace/setting")),
        *("/v2/systemsharedmemory/status", "/grps/v1/health/live", "/grps/v1/health/ready"),
    ),
    "post": ("/v2/repository/index", "/v2/models/identity/infer", "/v2/logging"),
}
BODIES = {"/v2/models/identity/infer": {"inputs": [VECTOR], "outputs": [{"name": "OUTPUT0"}]}}


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, paths in ANSWERS.items() for path in paths]
)
def test_answers_are_as_it_says(client: Client, document: dict[str, Any], method, path) -> None:
    body = BODIES.get(path)
    answer = client.simulate_request(method.upper(), path, json=body)
    template = path.replace("/identity", "/{name}")
    operation = document["paths"][template][method]

    def check(content: dict[str, Any], value: Any) -> None:
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        Draft202012Validator(schema).validate(value)

    if body is not None:
        check(operation["requestBody"]["content"], body)
    told = operation["responses"]["200" if answer.status_code == 200 else "default"]
    check(told["content"], answer.json)
    if answer.status_code == 200 and path.startswith("/v2"):  # no field is missing in the schema
        known = _properties(told["content"]["application/json"]["schema"], document)
        assert not known or set(answer.json) <= known


def _properties(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    """Return the names of an object's properties; empty for a free-form object or another type."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return set(document["components"]["schemas"].get(name, {}).get("properties", ()))
