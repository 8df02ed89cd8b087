"""Form fields: types of an object's fields, and values of the parts of a form."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any

from msgspec import inspect as kinds

from shmserve.errors import InvalidArgument, UnreadableMessage
from shmserve.executor.backends.hinted.signatures import plain
from shmserve.protocol.decoding import json_decoder

_OBJECTS = (kinds.StructType, kinds.DataclassType, kinds.TypedDictType)
_LISTS = (kinds.ListType, kinds.VarTupleType, kinds.SetType, kinds.FrozenSetType)
_TUPLES = (kinds.TupleType, kinds.NamedTupleType)
_FROM_JSON = (*_OBJECTS, *_LISTS, *_TUPLES, kinds.DictType)
_BYTES = (kinds.BytesType, kinds.ByteArrayType, kinds.MemoryViewType)


def is_object(hint: Any) -> bool:
    """Return True if a hint is an object or a dict, such as a struct or a model of pydantic."""
    hint = _bare(hint)
    if is_pydantic(hint):
        return True
    try:
        return isinstance(kinds.type_info(hint), (*_OBJECTS, kinds.DictType))
    except TypeError:
        return False


def _bare(hint: Any) -> Any:
    """Return a hint without what `Annotated` adds, such as a title."""
    while typing.get_origin(hint := plain(hint)) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def is_pydantic(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "model_validate")


def fields_of(kind: Any) -> dict[str, tuple[kinds.Type, ...]]:
    """Return the possible types of each field of an object; empty for objects of unknown keys."""
    kind = _bare(kind)
    if is_pydantic(kind):
        by_name = {"populate_by_name", "validate_by_name"}.intersection(
            key for key, value in kind.model_config.items() if value
        )
        found: dict[str, tuple[kinds.Type, ...]] = {}
        for name, field in kind.model_fields.items():
            alias = field.validation_alias or field.alias
            names = [
                *getattr(alias, "choices", (alias,)),
                *([name] if by_name or not alias else ()),
            ]
            types = _types(field.annotation)
            found.update((n, types) for n in names if isinstance(n, str))
        return found
    info = kinds.type_info(kind)
    if not isinstance(info, _OBJECTS):
        return {}
    return {field.encode_name: _members(field.type) for field in info.fields}


def other_fields(kind: Any) -> tuple[kinds.Type, ...]:
    """Return the possible types of the values of a dict; empty for objects of known keys."""
    kind = _bare(kind)
    info = None if is_pydantic(kind) else kinds.type_info(kind)
    return _members(info.value_type) if isinstance(info, kinds.DictType) else ()


def _members(kind: kinds.Type) -> tuple[kinds.Type, ...]:
    """Return the types that a type stands for, without titles and descriptions."""
    if isinstance(kind, kinds.Metadata):
        return _members(kind.type)
    if isinstance(kind, kinds.UnionType):
        return tuple(one for member in kind.types for one in _members(member))
    return (kind,)


def _types(hint: Any) -> tuple[kinds.Type, ...]:
    """Return the possible types of a hint for pydantic, AnyType for types unknown to msgspec."""
    found: list[kinds.Type] = []
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    for member in typing.get_args(hint) if is_union else (hint,):
        try:
            found += _members(kinds.type_info(member))
        except TypeError:
            found.append(kinds.AnyType())
    return tuple(found)


def of_parts(name: str, types: tuple[kinds.Type, ...], parts: list[bytes]) -> Any:
    """Return the value of a field for the parts of this name. Bytes stay as they are."""
    for kind in types:
        if isinstance(kind, _LISTS) and (len(parts) > 1 or _holds_bytes(kind)):
            return [of_parts(name, _members(kind.item_type), [part]) for part in parts]
    if len(parts) > 1:
        raise InvalidArgument(
            f"the form has part '{name}' {len(parts)} times, and no list takes it"
        )
    if any(isinstance(kind, _BYTES) for kind in types):
        return parts[0]
    try:
        text = parts[0].decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"part '{name}' of the form is not UTF-8") from None
    if not any(isinstance(k, _FROM_JSON) or is_pydantic(getattr(k, "cls", 0)) for k in types):
        return text
    takes_text = any(isinstance(kind, kinds.StrType) for kind in types)
    try:
        value = _any_json(parts[0])
    except UnreadableMessage as ex:
        if takes_text:
            return text
        raise InvalidArgument(f"part '{name}' of the form: {ex.message}") from None
    return value if isinstance(value, dict | list) or not takes_text else text


_any_json = json_decoder()


def is_file(kind: kinds.Type) -> bool:
    """Return True for bytes and lists of bytes."""
    return isinstance(kind, _BYTES) or _holds_bytes(kind)


def _holds_bytes(kind: Any) -> bool:
    return isinstance(kind, _LISTS) and any(isinstance(k, _BYTES) for k in _members(kind.item_type))
