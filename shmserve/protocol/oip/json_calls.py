"""Free JSON: requests of models that take plain values instead of tensors.

Such a model has one BYTES input and one BYTES output, both named `json`: the body of a request, and
the answer as JSON, or as bytes with a content type. A form (multipart/form-data) is MessagePack
instead: an array of names and contents. The executor knows a form by the first byte, which no JSON
text can begin with.

The executor, which alone reads the model's code, describes both bodies in the parameter
`json_schema` of the model's configuration. Frontends read the description from there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import json_decoder, msgpack_decoder
from shmserve.tensor.spec import ModelSpec

JSON_TENSOR = "json"
SCHEMA_PARAMETER = "json_schema"
MAX_SCHEMA_BYTES = 64 << 10
MAX_PARTS = 64  # of a form
_SAMPLES = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "array": []}
_SAMPLE_DEPTH = 4  # objects and choices within each other
_FORM_BEGIN = 0x80  # below this value: the first bytes of JSON texts

Parts = Sequence[tuple[str, bytes]]


class JsonCallSchemas(Struct, frozen=True, omit_defaults=True):
    """JSON schemas of a model's bodies.

    Attributes:
        summary: first line of the function's documentation.
        body, answer: schemas of the request and of each answer.
        files: names of arguments that are bytes, or lists of bytes.
        components: schemas by name, to which `body` and `answer` refer as OpenAPI documents do.
        media: content type of an answer that is bytes; "" for JSON.
    """

    summary: str = ""
    body: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    files: tuple[str, ...] = ()
    components: dict[str, Any] = {}
    media: str = ""


_decode = json_decoder(JsonCallSchemas)
_parts = msgpack_decoder(Annotated[list[tuple[str, bytes]], Meta(max_length=MAX_PARTS)])


def takes_json(spec: ModelSpec) -> bool:
    """Return True if a model takes plain values."""
    return (
        SCHEMA_PARAMETER in spec.parameters
        and [(t.name, t.datatype) for t in spec.inputs] == [(JSON_TENSOR, "BYTES")]
        and [(t.name, t.datatype) for t in spec.outputs] == [(JSON_TENSOR, "BYTES")]
    )


def encode_schemas(schemas: JsonCallSchemas) -> str:
    """Return the value of the parameter. Schemas beyond `MAX_SCHEMA_BYTES` are left out."""
    text = msgspec.json.encode(schemas)
    if len(text) > MAX_SCHEMA_BYTES:
        text = msgspec.json.encode(JsonCallSchemas(files=schemas.files, media=schemas.media))
    return text.decode()


@functools.lru_cache(maxsize=256)
def decode_schemas(text: str) -> JsonCallSchemas:
    """Return the schemas of the parameter's value, none if the value is something else."""
    try:
        schemas: JsonCallSchemas = _decode(text.encode())
    except UnreadableMessage:
        return JsonCallSchemas()
    return schemas


def sample(schemas: JsonCallSchemas) -> Any:
    """Return a small body that fits the schema if no constraint forbids empty values. Return an
    empty body for a schema that cannot be read, since a configuration may hold any text."""
    try:
        return _sample(schemas.body, schemas.components, _SAMPLE_DEPTH)
    except (AttributeError, LookupError, TypeError):
        return {}


def _sample(schema: dict[str, Any], components: dict[str, Any], depth: int) -> Any:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    schema = components.get(name, schema)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema and depth:
        return _sample(schema["anyOf"][0], components, depth - 1)
    kind = schema.get("type", "object")
    if kind != "object" or not depth:
        return _SAMPLES.get(kind)
    members = schema.get("properties", {})
    return {
        key: _sample(members.get(key, {}), components, depth - 1)
        for key in schema.get("required", ())
    }


def is_form(body: bytes) -> bool:
    """Return True if a body is a form, False if the body is JSON."""
    return bool(body) and body[0] >= _FORM_BEGIN


def encode_form(parts: Parts) -> bytes:
    """Return the body of a form."""
    return msgspec.msgpack.encode(parts)


def decode_form(body: bytes) -> Parts:
    """Return the parts of a form. Raise UnreadableMessage for other bytes."""
    parts: Parts = _parts(body)
    return parts
