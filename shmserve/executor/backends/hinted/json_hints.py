"""JSON hints: functions on plain values, msgspec's structs, dataclasses and pydantic's models."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Container, Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec import inspect as kinds
from msgspec.structs import replace

from shmserve.errors import ConfigError, Internal, InvalidArgument, UnreadableMessage
from shmserve.executor.backends.hinted.form_fields import (
    fields_of,
    is_file,
    is_object,
    is_pydantic,
    of_parts,
    other_fields,
)
from shmserve.executor.backends.hinted.signatures import HintedSignature, set_batching
from shmserve.executor.backends.hinted.unchecked_hints import refuse_dataclasses, refuse_unchecked
from shmserve.executor.backends.model_errors import one_line, sanitised
from shmserve.executor.backends.triton.auto_complete import AutoCompleteConfig
from shmserve.model import ContentType
from shmserve.protocol.decoding import json_decoder
from shmserve.protocol.oip.json_calls import (
    JSON_TENSOR,
    MAX_PARTS,
    SCHEMA_PARAMETER,
    JsonCallSchemas,
    decode_form,
    encode_schemas,
    is_form,
)
from shmserve.tensor.dtypes import object_array

_TENSOR = {"name": JSON_TENSOR, "data_type": "TYPE_STRING", "dims": [1]}


class JsonCall:
    """Way between the body of a request and the arguments and answer of a function on plain values.

    An argument that is an object (a struct, dataclass, TypedDict, dict or pydantic's model) is the
    body, if the function has no other argument. Otherwise the body is an object with a key for each
    argument. The arguments of a batched function are lists with an element for each caller. Raise
    ConfigError for hints that JSON cannot carry.
    """

    def __init__(self, signature: HintedSignature, model: str, summary: str) -> None:
        signature = self._signature = _of_one_caller(signature) if signature.batching else signature
        refuse_unchecked(signature)
        self._root = ""  # argument that is the whole body
        if len(signature.arguments) == 1 and is_object(signature.arguments[0].hint):
            self._root = signature.arguments[0].name
        self._kind = signature.arguments[0].hint if self._root else _struct_of(signature)
        self._schemas = _schemas(self._kind, signature, model, summary)
        self._schemas = replace(self._schemas, media=_media_of(signature))
        self._decode = json_decoder(self._kind, _made)
        self._fields, self._others = fields_of(self._kind), other_fields(self._kind)
        self._encode = msgspec.json.Encoder(enc_hook=_plain_value).encode

    def complete(self, config: AutoCompleteConfig) -> AutoCompleteConfig:
        """Add the tensor of the body, the tensor of the answer, and the schemas."""
        config.set_model_transaction_policy({"decoupled": self._signature.streams})
        config.add_input(_TENSOR)
        config.add_output(_TENSOR)
        if self._signature.batching:
            set_batching(config.as_dict(), self._signature.batching)
        elif size := config.as_dict().get("max_batch_size"):
            raise ValueError(f"max_batch_size is {size} in the configuration, without @batched")
        parameters = config.as_dict().setdefault("parameters", {})
        parameters[SCHEMA_PARAMETER] = {"string_value": encode_schemas(self._schemas)}
        return config

    def arguments(self, request: Any) -> dict[str, Any]:
        """Return the arguments of the function for a request of the native dialect. Raise
        InvalidArgument for a body that does not fit; the text names the field."""
        bodies = request.input(JSON_TENSOR).reshape(-1)
        if len(bodies) != 1:
            raise InvalidArgument(f"input '{JSON_TENSOR}' has {len(bodies)} bodies: send one")
        body: bytes = bodies[0]
        try:
            value = self._of_form(body) if is_form(body) else self._decode(body or b"{}")
        except (UnreadableMessage, msgspec.ValidationError) as ex:
            text = ex.message if isinstance(ex, UnreadableMessage) else str(ex)
            text = one_line(text)  # the text may quote a long value
            is_object = is_form(body) or body.lstrip()[:1] == b"{"
            raise InvalidArgument(text if is_object else text + self._of_file()) from None
        if self._root:
            return {self._root: value}
        given = {a.name: getattr(value, a.name) for a in self._signature.arguments}
        defaults = {a.name: a.default for a in self._signature.arguments}
        return {n: defaults[n] if item is UNSET else item for n, item in given.items()}

    def answer(self, result: Any) -> dict[str, Any]:
        """Return an answer as JSON, or as bytes if it has a content type. Raise Internal if
        the answer is or holds an unknown type."""
        is_file = bool(self._schemas.media)
        if is_file and not isinstance(result, bytes):
            raise Internal(f"the answer must be bytes, not {type(result).__name__}")
        try:
            text = result if is_file else self._encode(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as ex:
            raise Internal(f"the answer has no JSON form: {sanitised(str(ex))}") from None
        shape = (1, 1) if self._signature.batching else (1,)
        return {JSON_TENSOR: object_array([text], shape)}

    def _of_form(self, body: bytes) -> Any:
        """Return the value of a form. Text becomes the field's type."""
        given: dict[str, list[bytes]] = {}
        try:
            parts = decode_form(body)
        except UnreadableMessage:
            raise InvalidArgument(
                f"the body is neither JSON nor a form of at most {MAX_PARTS} parts{self._of_file()}"
            ) from None
        for name, content in parts:
            if name not in self._fields and not self._others:
                raise InvalidArgument(
                    f"the form has a part '{name}', and no argument has this name"
                )
            given.setdefault(name, []).append(content)
        members = {n: of_parts(n, self._fields.get(n, self._others), p) for n, p in given.items()}
        return msgspec.convert(members, self._kind, strict=False, dec_hook=_made)

    def _of_file(self) -> str:
        """Return advice for a body that may be a file without its form; "" if no file is taken."""
        files = self._schemas.files
        return f": send '{files[0]}' in a form (multipart/form-data)" if files else ""


def _of_one_caller(signature: HintedSignature) -> HintedSignature:
    """Return the signature of a batched function as one caller sees the function."""
    if signature.streams or signature.request:
        raise ConfigError("batched is for functions with one answer, and without a ModelRequest")
    arguments = [replace(a, hint=_element(a.hint, f"'{a.name}'")) for a in signature.arguments]
    answer = _element(signature.answer, "the answer")
    return replace(signature, arguments=tuple(arguments), answer=answer)


def _element(hint: Any, where: str) -> Any:
    if typing.get_origin(hint) is not list or not typing.get_args(hint):
        raise ConfigError(
            f"{where} of a batched function must be a list, with an element for each caller: write"
            f" list[{'str' if hint in (list, typing.List) else getattr(hint, '__name__', hint)}]"  # noqa: UP006
        )
    return typing.get_args(hint)[0]


def _struct_of(signature: HintedSignature) -> Any:
    """Return a struct with a field for each argument."""
    fields = [
        (a.name, typing.Union[a.hint, UnsetType], UNSET) if a.optional else (a.name, a.hint)  # noqa: UP007
        for a in signature.arguments
    ]
    return msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)


def _made(kind: type[Any], value: Any) -> Any:
    """Return a value of a type that msgspec does not know: pydantic checks its own."""
    try:
        return kind.model_validate(value)
    except ValueError as ex:
        errors = getattr(ex, "errors", None)
        first = errors()[0] if errors else {"loc": (), "msg": str(ex)}
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{first['msg']}{f' - at `{place}`' if place else ''}") from None


def _plain_value(value: Any) -> Any:
    """Return a value that msgspec can encode, for numpy's values and pydantic's models."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not known")


def _schemas(kind: Any, signature: HintedSignature, model: str, summary: str) -> JsonCallSchemas:
    """Return the schemas of a function, which exist only if JSON can carry the hints."""
    prefix = re.sub(r"[^\w.-]", "_", model)
    template = f"#/components/schemas/{prefix}.{{}}"
    found: dict[Any, dict[str, Any]] = {}  # schemas of pydantic's models

    def schema_of(unknown: type[Any]) -> dict[str, Any]:
        if not is_pydantic(unknown):
            raise TypeError(f"unknown type {unknown.__name__}")
        return dict(found.setdefault(unknown, {"type": "object"}))

    def described() -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
        return msgspec.json.schema_components(
            (kind, signature.answer), schema_hook=schema_of, ref_template=template.format("{name}")
        )

    try:
        refuse_dataclasses(kinds.type_info(kind), set())
        _, more = described()
        components = _fill_in(found, template, more)
        (body, given), more = described()
    except (TypeError, RuntimeError) as ex:  # pydantic's is a RuntimeError
        text = (str(ex).splitlines() or [""])[0]
        raise ConfigError(
            f"{_without_schema(signature, schema_of)}: JSON has no form for a hint ({text}): write"
            " plain types, a msgspec.Struct, a dataclass, or NDArray[np.float32] for arrays"
        ) from None
    named = {f"{prefix}.{name}": schema for name, schema in (more | components).items()}
    if "$ref" in body and kind.__name__ == "Arguments":
        body = named.pop(body["$ref"].rpartition("/")[2], body)
    files = [n for n, types in fields_of(kind).items() if any(map(is_file, types))]
    return JsonCallSchemas(summary, body, given, tuple(files), named)


def _without_schema(signature: HintedSignature, schema_of: Callable[[type[Any]], Any]) -> str:
    """Return the place of the first hint that has no schema."""
    for argument in signature.arguments:
        try:
            msgspec.json.schema(argument.hint, schema_hook=schema_of)
        except Exception:
            return f"argument '{argument.name}'"
    return "the answer"


def _fill_in(
    schemas: dict[Any, dict[str, Any]], template: str, taken: Container[str]
) -> dict[str, Any]:
    """Write the schemas of pydantic's models, all at once, so that classes of equal names get names
    of their own. Return the definitions. `taken`: names of definitions of other kinds."""
    if not schemas:
        return {}
    from pydantic.json_schema import models_json_schema

    modes: Any = [(kind, "validation") for kind in schemas]
    for begin in ("", "pydantic."):
        inner = template.format(begin + "{model}")
        found, document = models_json_schema(modes, ref_template=inner)
        definitions = document.get("$defs", {})
        if not any(name in taken for name in definitions):
            break
    for (kind, _), schema in found.items():
        schemas[kind] = schema
    return {begin + name: schema for name, schema in definitions.items()}


def _media_of(signature: HintedSignature) -> str:
    """Return the content type in the hint of an answer, or "". Raise ConfigError for an answer that
    cannot have one."""
    hint = signature.answer
    found = [note.text for note in _notes(hint) if isinstance(note, ContentType)]
    is_bytes = typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is bytes
    if found and (signature.streams or not is_bytes):
        raise ConfigError(
            f"ContentType({found[0]!r}) is for one answer of bytes: write"
            f" -> Annotated[bytes, ContentType({found[0]!r})]"
        )
    return found[0] if found else ""


def _notes(hint: Any) -> Iterator[Any]:
    """Yield the annotations in a hint, also of its parts."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield from _notes(part)


def summary_of(target: Any) -> str:
    """Return the first line of a function's or class's documentation."""
    own = target.__dict__.get("__doc__") if isinstance(target, type) else target.__doc__
    return inspect.cleandoc(own or "").partition("\n")[0]
