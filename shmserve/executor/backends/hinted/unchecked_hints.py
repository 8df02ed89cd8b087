"""Unchecked hints: what msgspec passes over in the hints of a function on plain values.

msgspec knows no constraints of pydantic, annotated_types and FastAPI. pydantic's models take bytes
as plain text unless told otherwise, while `bytes` elsewhere are base64. Both would be wrong data
without an error, so such a model does not load.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import inspect as kinds

from shmserve.errors import ConfigError
from shmserve.executor.backends.hinted.signatures import HintedSignature, plain

_UNCHECKED = ("pydantic", "annotated_types", "fastapi")
# attributes of constraints that msgspec.Meta has as well
_OF_META = (
    *("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length"),
    *("title", "description"),
)


def refuse_unchecked(signature: HintedSignature) -> None:
    """Raise ConfigError for constraints of arguments that are not checked, and for bytes in
    pydantic's models that are no base64. The text names the argument and the remedy."""
    for argument in signature.arguments:
        where = f"argument '{argument.name}'"
        _refuse_constraint(argument.default, where)
        for place, model, part in _parts(argument.hint, where, None, set()):
            if model is None:
                _refuse_constraint(part, place)
            _refuse_bytes(part, model, place, "val_json_bytes")
    for place, model, part in _parts(signature.answer, "the answer", None, set()):
        _refuse_bytes(part, model, place, "ser_json_bytes")


def refuse_dataclasses(info: Any, seen: set[int]) -> None:
    """Raise ConfigError for a dataclass of pydantic's, whose constraints msgspec does not know."""
    if isinstance(info, tuple):
        for member in info:
            refuse_dataclasses(member, seen)
    elif isinstance(info, kinds.Type | kinds.Field) and id(info) not in seen:
        seen.add(id(info))
        if isinstance(info, kinds.DataclassType) and hasattr(info.cls, "__pydantic_validator__"):
            raise ConfigError(
                f"'{info.cls.__name__}' is a dataclass of pydantic's, whose constraints are not"
                f" checked: write class {info.cls.__name__}(BaseModel)"
            )
        refuse_dataclasses(msgspec.structs.astuple(info), seen)


def _parts(
    hint: Any, where: str, model: Any, seen: set[tuple[Any, Any]]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the types, metadata and default values within a hint, each with a place, and with the
    class in which pydantic found the part, or None. `seen`: classes so far, each with such a
    class."""
    hint = plain(hint)
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is ClassVar:
        return
    if origin is Annotated:
        hint, *notes = members
        yield from ((where, model, note) for note in notes)
        if not any(hasattr(note, "encoder") for note in notes):  # of pydantic.Base64Bytes
            yield from _parts(hint, where, model, seen)
        return
    yield where, model, hint
    for member in (origin, getattr(hint, "__supertype__", None), *members):
        if member is not None:
            yield from _parts(member, where, model, seen)
    if isinstance(hint, type) and (hint, model) not in seen:
        seen.add((hint, model))
        if model is not None or hasattr(hint, "__pydantic_validator__"):
            model = hint
        for name, field, default in _fields(hint):
            place = f"{where}, field '{name}'"
            yield place, model, default
            yield from _parts(field, place, model, seen)


def _fields(kind: Any) -> list[tuple[str, Any, Any]]:
    """Return name, hint and default value of each field of a class."""
    if hasattr(kind, "model_fields"):
        return [
            (name, Annotated[(field.annotation, None, *field.metadata)], None)
            for name, field in kind.model_fields.items()
        ]
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
        info = kinds.type_info(kind)
    except Exception:  # msgspec tells what is wrong with the class
        return []
    defaults = {field.name: field.default for field in getattr(info, "fields", ())}
    return [(name, hint, defaults.get(name)) for name, hint in hints.items()]


def _refuse_constraint(part: Any, where: str) -> None:
    kind = part if isinstance(part, type) else type(part)
    package = str(kind.__module__).partition(".")[0]
    if not package.startswith(_UNCHECKED) or hasattr(kind, "model_fields"):
        return
    given = {
        name: value
        for one in (part, *(getattr(part, "metadata", None) or ()))
        for name in _OF_META
        if isinstance(value := getattr(one, name, None), str | int | float)
    }
    limits = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise ConfigError(
        f"{where}: {package}'s {kind.__name__.removesuffix('Info')} is not checked here: use"
        f" msgspec.Meta{limits and f'({limits})'}, or a pydantic BaseModel"
    )


def _refuse_bytes(part: Any, model: Any, where: str, setting: str) -> None:
    if model is None or (part is not bytes and part is not bytearray):
        return
    name = "model_config" if hasattr(model, "model_config") else "__pydantic_config__"
    if setting not in getattr(model, name, {}):
        raise ConfigError(
            f"{where}: pydantic's bytes are plain text in JSON: write {name} ="
            f' ConfigDict({setting}="base64") in class {model.__name__}, or "utf8" for text'
        )
