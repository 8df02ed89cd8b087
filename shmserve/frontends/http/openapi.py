"""OpenAPI 3.1 document of the HTTP API, made from the table of routes.

An `Operation` describes purpose, bodies and answers of a route. Schemas come from the types of
bodies and answers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from shmserve.core.access import Action
from shmserve.frontends.oip.origins import ACTION_OF
from shmserve.frontends.oip.restricted_apis import CATEGORIES, Category
from shmserve.protocol.oip.json_calls import SCHEMA_PARAMETER, JsonCallSchemas, decode_schemas
from shmserve.tensor.spec import ModelSpec

JSON = "application/json"
BINARY = "application/octet-stream"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"
_SCHEMA = "#/components/schemas/{name}"
_DESCRIPTION = """\
The Open Inference Protocol V2 with Triton's extensions, and additions of this server. Tags are the
categories of http_restricted_api, x-action is the right that a caller needs. Models may add paths
of their own."""
_BINARY_LENGTH = "Inference-Header-Content-Length"


class Error(Struct, frozen=True):
    """Why a request was refused, or failed: one line."""

    error: str


class Operation(Struct, frozen=True):
    """Description of one method of a route.

    Attributes:
        body, answer, error: types of JSON documents that msgspec can describe; None for no
            document.
        required: whether the body is required.
        media: media type of the answer; only JSON answers have a schema.
        query: names of query parameters.
        other_media: media types of bodies and answers besides JSON.
        tensors: whether raw tensors may follow the JSON part of bodies and answers.
        example: a body; None: no example.
    """

    summary: str
    body: Any = None
    answer: Any = None
    error: Any = Error
    required: bool = True
    media: str = JSON
    query: tuple[str, ...] = ()
    other_media: tuple[str, ...] = ()
    tensors: bool = False
    example: Any = None


class Route(Struct, frozen=True):
    """A path in OpenAPI's form, and its methods. `actions`: action of requests, by method."""

    path: str
    category: Category
    methods: Mapping[str, Operation]
    actions: Mapping[str, Action]


def described(template: str, methods: Iterable[str], descriptions: Mapping[str, Operation]) -> Any:
    """Return the operations of a route, by method. `descriptions` has operations by method and
    path, such as ``GET /v2/models/{name}``, which also describes the path with a version. A method
    without an operation in `descriptions` gets method and path as summary."""
    path = plain(template)
    short = path.replace("/versions/{version}", "").replace("/{repository}/", "/")
    operations = {}
    for method in methods:
        like = "GET" if method == "HEAD" else method
        operation = descriptions.get(f"{like} {path}") or descriptions.get(f"{like} {short}")
        operations[method] = operation or Operation(f"{like} {path}")
    return operations


def plain(template: str) -> str:
    """Return a route's template without the converters of its variables."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", template)


def document(routes: Iterable[Route], title: str, version: str) -> dict[str, Any]:
    """Return the whole document, as JSON values."""
    route_list = list(routes)
    types = [kind for kind in _types(route_list) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_SCHEMA)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(route_list, key=lambda route: route.path):
        paths[route.path] = {"parameters": _path_parameters(route.path)} | {
            method.lower(): _operation(route, method, operation, by_type)
            for method, operation in route.methods.items()
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": _DESCRIPTION},
        "servers": [{"url": "."}],
        "tags": [{"name": category} for category in CATEGORIES],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "shmserve-key"},
            },
        },
    }


def with_models(made: dict[str, Any], specs: Iterable[ModelSpec]) -> dict[str, Any]:
    """Return a document with a path for each model that takes plain values."""
    paths, components = dict(made["paths"]), dict(made["components"])
    for spec in specs:
        schemas = decode_schemas(spec.parameters[SCHEMA_PARAMETER])
        paths[f"/models/{quote(spec.name, '')}"] = {"post": _model_operation(spec, schemas)}
        components["schemas"] = schemas.components | components["schemas"]  # the first wins
    return made | {"paths": paths, "components": components}


def _model_operation(spec: ModelSpec, schemas: JsonCallSchemas) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": schemas.body}}
    if schemas.files:
        files = {name: {"type": "string", "format": "binary"} for name in schemas.files}
        content[FORM] = {"schema": {"type": "object", "properties": files}}
    answer = {EVENTS: {}} if spec.decoupled else {JSON: {"schema": schemas.answer}}
    if schemas.media:
        answer = {schemas.media: {"schema": {"type": "string", "format": "binary"}}}
    failed = {JSON: {"schema": {"$ref": _SCHEMA.format(name=Error.__name__)}}}
    return {
        "operationId": f"post_model:{spec.name}",  # unique: "a-b" and "a_b" are two models
        "summary": schemas.summary or f"Model {spec.name}",
        "tags": ["inference"],
        "x-action": ACTION_OF["inference"],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {"description": "done", "content": answer},
            "default": {"description": "refused, or failed", "content": failed},
        },
    }


def _types(routes: Iterable[Route]) -> Iterator[Any]:
    for route in routes:
        for operation in route.methods.values():
            yield from (operation.body, operation.answer, operation.error)


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _operation(
    route: Route, method: str, operation: Operation, schemas: Mapping[str, Any]
) -> dict[str, Any]:
    path = re.sub(r"\W+", "_", route.path).strip("_")
    made: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path}",
        "summary": operation.summary,
        "tags": [route.category],
        "x-action": route.actions[method],
        "parameters": _parameters(operation),
        "responses": _responses(method, operation, schemas),
    }
    if operation.body is not None and method == "POST":
        content = _content(operation.body, operation, schemas)
        if operation.example is not None:
            content[JSON]["example"] = operation.example
        made["requestBody"] = {"required": operation.required, "content": content}
    return {name: value for name, value in made.items() if value != []}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": text} for name in operation.query
    ]
    if operation.tensors:
        length = "bytes of the JSON part, if raw tensors follow; 0: no JSON part"
        receipt = "1: the answer's header of this name tells copied bytes and times"
        parameters += [
            _header(_BINARY_LENGTH, {"type": "integer", "minimum": 0}, length),
            _header("shmserve-receipt", {"type": "string", "const": "1"}, receipt),
        ]
    return parameters


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": text}


def _responses(method: str, operation: Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "done"}
    failed: dict[str, Any] = {"description": "refused, or failed"}
    if method != "HEAD":
        failed["content"] = {JSON: {"schema": schemas[repr(operation.error)]}}
        if operation.media != JSON:
            done["content"] = {operation.media: {}}
        elif operation.answer is not None:
            done["content"] = _content(operation.answer, operation, schemas)
    return {"200": done, "default": failed}


def _content(kind: Any, operation: Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    others = (*operation.other_media, *((BINARY,) if operation.tensors else ()))
    return {JSON: {"schema": schemas[repr(kind)]}} | {media: {} for media in others}
