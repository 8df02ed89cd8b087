"""JSON reader: GRPS messages from JSON, as protocol buffers map messages to JSON.

The usual request takes one typed msgspec decode, and numpy packs the arrays. If msgspec refuses
the text (bare NaN in an `ndarray`, camelCase names), the standard library reads the text, and the
document is handled in the same way. An `ndarray`, which protobuf does not know, is a nested list;
it becomes an FP32 tensor without a name.
"""

from __future__ import annotations

import base64
import binascii
import struct
from types import GenericAlias
from typing import Annotated, Any, Optional

import msgspec
import numpy as np
from msgspec import Meta

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol import ndarray_json
from shmserve.grps.protocol.grps_message import (
    KINDS,
    GenericMap,
    GenericTensor,
    GrpsDataType,
    GrpsMessage,
)
from shmserve.grps.protocol.message_wire import WIRE_TYPES
from shmserve.grps.protocol.ndarray_json import NotSimple
from shmserve.protocol.oip import strict_parser

Array = np.ndarray[Any, Any]

FIELDS = {kind: f"flat_{kind.name[3:].lower()}" for kind in GrpsDataType if kind}
_SHOWN = 64  # limit of characters of a client's value that a message repeats
# camelCase name, which protobuf accepts, too -> name
_CAMEL = {"flat" + name[5:].capitalize(): name for name in FIELDS.values()}
_CAMEL |= {"s" + name[2:].upper(): name for name in GenericMap.__struct_fields__}
_CAMEL |= {"binData": "bin_data", "strData": "str_data"}

# numpy's type -> code of `struct`
_CODES = {"<u4": "I", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}


def _elements(kind: GrpsDataType) -> Any:
    if kind is GrpsDataType.DT_STRING:
        return list[str]
    return list[int] if WIRE_TYPES[kind].kind in "iu" else list[float]


# default of fields that keep their JSON text
_NONE = msgspec.Raw(b"")
_NULL = b"null"
_Dim = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


def _struct(name: str, fields: list[tuple[str, Any]], more: list[Any] | None = None) -> Any:
    """Return a struct type of optional fields, which also notices their camelCase names."""
    names = {field for field, _ in fields}
    camels = [(camel, msgspec.Raw, _NONE) for camel, field in _CAMEL.items() if field in names]
    optional = [(field, Optional[kind], None) for field, kind in fields]  # noqa: UP045
    return msgspec.defstruct(name, [*optional, *camels, *(more or [])])


_JsonTensor = _struct(
    "_JsonTensor",
    [
        ("name", str),
        ("dtype", str | int),
        ("shape", list[_Dim]),
        *((name, _elements(kind)) for kind, name in FIELDS.items()),
    ],
)
_JsonMap = _struct(
    "_JsonMap",
    [
        ("s_s", dict[str, str]),
        ("s_b", dict[str, str]),
        ("s_i32", dict[str, _Int32]),
        ("s_i64", dict[str, _Int64]),
        ("s_f", dict[str, float]),
        ("s_d", dict[str, float]),
    ],
)


_JsonTensors = _struct("_JsonTensors", [("tensors", GenericAlias(list, (_JsonTensor,)))])
_JsonMessage = _struct(
    "_JsonMessage",
    [
        ("model", str),
        ("bin_data", Any),
        ("str_data", str),
        ("gtensors", _JsonTensors),
        ("gmap", _JsonMap),
    ],
    [("ndarray", msgspec.Raw, _NONE)],
)


# Not strict: numbers may be text, as protobuf writes 64-bit integers.
_decode = msgspec.json.Decoder(_JsonMessage, strict=False).decode


def parse(text: bytes) -> GrpsMessage:
    """Read a request. Raise InvalidArgument if it is malformed, or has no payload or several."""
    try:
        source = _decode(text)
        ndarray = bytes(source.ndarray)
        if ndarray and ndarray != _NULL:
            _choose(source, True)
            return GrpsMessage(model=source.model or "", gtensors=[ndarray_json.from_text(ndarray)])
        return _message(source)
    except msgspec.ValidationError as ex:
        raise _refused(ex) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotSimple):
        return _other(strict_parser.loads(text))


def _refused(ex: Exception) -> InvalidArgument:
    return InvalidArgument(f"bad request: {str(ex).replace('$.', '').replace('`', chr(39))}")


def _other(document: Any) -> GrpsMessage:
    """Read a document that msgspec could not decode directly."""
    if not isinstance(document, dict):
        raise InvalidArgument("the request must be a JSON object")
    document = _renamed(document)
    ndarray = document.pop("ndarray", None)
    try:
        source = msgspec.convert(document, _JsonMessage, strict=False)
    except msgspec.ValidationError as ex:
        raise _refused(ex) from None
    if ndarray is not None:
        _choose(source, True)
        return GrpsMessage(model=source.model or "", gtensors=[ndarray_json.from_value(ndarray)])
    return _message(source)


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with camelCase names replaced by the schema's names."""

    def snake(fields: Any) -> Any:
        if type(fields) is not dict:
            return fields
        given = {k: v for k, v in fields.items() if v is not None}  # null: the field is not there
        twice = next((k for k in given if _CAMEL.get(k) in given), None)
        if twice is not None:
            raise InvalidArgument(f"a field is given by two names: {_CAMEL[twice]} and {twice}")
        return {_CAMEL.get(k, k): v for k, v in given.items()}

    document = snake(document)
    document["gmap"] = snake(document.get("gmap"))
    gtensors = document.get("gtensors")
    if isinstance(gtensors, dict) and isinstance(gtensors.get("tensors"), list):
        document["gtensors"] = {"tensors": [snake(item) for item in gtensors["tensors"]]}
    return document


def _message(source: Any) -> GrpsMessage:
    _choose(source, False)
    model = source.model or ""
    if source.str_data is not None:
        return GrpsMessage(model=model, str_data=source.str_data)
    if source.gtensors is not None:
        tensors = [_tensor(item) for item in source.gtensors.tensors or ()]
        return GrpsMessage(model=model, gtensors=tensors)
    return GrpsMessage(model=model, gmap=_map(source.gmap))


def _choose(source: Any, ndarray: bool) -> None:
    """Check that there is exactly one payload, other than bin_data."""
    _no_camel(source)
    payloads = (source.bin_data, source.str_data, source.gtensors, ndarray or None, source.gmap)
    kinds = [kind for kind, value in zip(KINDS, payloads, strict=True) if value is not None]
    if not kinds:
        raise InvalidArgument(
            "the request has no payload: set one of str_data, gtensors, ndarray and gmap"
        )
    if len(kinds) > 1:
        raise InvalidArgument(f"the request has several payloads: {', '.join(kinds)}; set one")
    if kinds == ["bin_data"]:
        raise InvalidArgument(
            "bin_data does not travel as JSON: send it as the body, as application/octet-stream"
        )


def _no_camel(source: Any) -> None:
    for name in source.__struct_fields__:
        if name in _CAMEL and getattr(source, name) is not _NONE:
            raise NotSimple


# ------------------------------------------------------------ tensors and maps


def _tensor(source: Any) -> GenericTensor:
    _no_camel(source)
    name = source.name or ""
    flat = {
        int(kind): _packed(name, kind, values)
        for kind, field in FIELDS.items()
        if (values := getattr(source, field))
    }
    return GenericTensor(name, _dtype(name, source.dtype), tuple(source.shape or ()), flat)


def _dtype(tensor: str, given: str | int | None) -> int:
    if isinstance(given, str):
        if given not in GrpsDataType.__members__:
            names = ", ".join(GrpsDataType.__members__)
            raise InvalidArgument(f"tensor '{tensor}': dtype '{given[:_SHOWN]}' is none of {names}")
        return GrpsDataType[given].value
    return given or 0


def _packed(tensor: str, kind: GrpsDataType, values: list[Any]) -> Array | list[str]:
    if kind is GrpsDataType.DT_STRING:
        return values
    dtype = WIRE_TYPES[kind]
    try:
        packed = struct.pack(f"<{len(values)}{_CODES[dtype.str]}", *values)
    except (struct.error, OverflowError):
        raise InvalidArgument(
            f"tensor '{tensor}': {FIELDS[kind]} has a value that is out of range"
        ) from None
    array: Array = np.frombuffer(packed, dtype)
    return array


def _map(source: Any) -> GenericMap:
    _no_camel(source)
    fields = {name: getattr(source, name) or {} for name in GenericMap.__struct_fields__}
    fields["s_b"] = {key: _base64(key, text) for key, text in fields["s_b"].items()}
    return GenericMap(**fields)


def _base64(key: str, text: str) -> bytes:
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"gmap: s_b '{key[:_SHOWN]}' is not base64") from None
