"""Protobuf wire form: reads and writes `GrpsMessage`.

As in every protobuf library: of several fields of the oneof, the last counts; repeated numbers may
be packed or not, and come in pieces; unknown fields are skipped.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol.grps_message import (
    KINDS,
    Bytes,
    GenericMap,
    GenericTensor,
    GrpsDataType,
    GrpsMessage,
    GrpsStatus,
)
from shmserve.protocol.protobuf import varints
from shmserve.protocol.protobuf.wire import (
    FIXED32,
    FIXED64,
    LEN,
    VARINT,
    Malformed,
    Walk,
    encode_varint,
    signed,
)

Array = np.ndarray[Any, Any]
Part = bytes | memoryview
_FLAT = 3  # field number of flat_* minus data type
_U32, _I32, _I64 = np.dtype("<u4"), np.dtype("<i4"), np.dtype("<i8")
_F32, _F64 = np.dtype("<f4"), np.dtype("<f8")
# numpy type of the elements of flat_*, as decoded from the wire
WIRE_TYPES: dict[int, np.dtype[Any]] = {
    GrpsDataType.DT_UINT8: _U32,
    GrpsDataType.DT_INT8: _I32,
    GrpsDataType.DT_INT16: _I32,
    GrpsDataType.DT_INT32: _I32,
    GrpsDataType.DT_INT64: _I64,
    GrpsDataType.DT_FLOAT16: _F32,
    GrpsDataType.DT_FLOAT32: _F32,
    GrpsDataType.DT_FLOAT64: _F64,
}

# ---------------------------------------------------------------------- reading


def parse(data: Bytes) -> GrpsMessage:
    """Read a message. `bin_data` and floating-point tensors are views of `data`. Raise
    InvalidArgument if the message is malformed."""
    try:
        return _message(memoryview(data).toreadonly())
    except Malformed as ex:
        raise InvalidArgument(f"the message is malformed: {ex.problem}") from None


def _message(view: memoryview) -> GrpsMessage:
    plain: dict[str, Any] = {}
    chosen: tuple[str, Any] | None = None
    for number, wire, value in _fields(view):
        if number == 1 and wire == LEN:
            plain["status"] = _status(value, plain.get("status"))
        elif number == 2 and wire == LEN:
            plain["model"] = _text(value)
        elif 3 <= number <= 7 and wire == LEN:
            kind = KINDS[number - 3]
            earlier = chosen[1] if chosen is not None and chosen[0] == kind else None
            chosen = (kind, _PAYLOAD[kind](value, earlier))
    if chosen is not None:
        plain[chosen[0]] = chosen[1]
    return GrpsMessage(**plain)


def glance(data: Bytes) -> tuple[str, bool]:
    """Return the name of the model, and whether a status is set, without reading the payload. Raise
    InvalidArgument if the outer fields are malformed."""
    model, has_status = "", False
    try:
        for number, wire, value in _fields(memoryview(data).toreadonly()):
            if wire != LEN:
                continue
            if number == 2:
                model = _text(value)
            has_status = has_status or number == 1
    except Malformed as ex:
        raise InvalidArgument(f"the message is malformed: {ex.problem}") from None
    return model, has_status


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) of each field: the number of a varint, a view of any other
    value."""
    walk = Walk(view)
    for tag, start, stop in walk.fields(0, len(view)):
        wire = tag & 7
        yield tag >> 3, wire, walk.varint(start) if wire == VARINT else view[start:stop]


def _text(view: memoryview) -> str:
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument("the message has a string that is not UTF-8") from None


def _status(view: memoryview, earlier: GrpsStatus | None) -> GrpsStatus:
    status = earlier or GrpsStatus()
    code, msg, flag = status.code, status.msg, status.status
    for number, wire, value in _fields(view):
        if number == 1 and wire == VARINT:
            code = signed(value, 32)
        elif number == 2 and wire == LEN:
            msg = _text(value)
        elif number == 3 and wire == VARINT:
            flag = signed(value, 32)
    return GrpsStatus(code, msg, flag)


def _tensors(view: memoryview, earlier: list[GenericTensor] | None) -> list[GenericTensor]:
    tensors = earlier or []
    tensors.extend(_tensor(value) for n, wire, value in _fields(view) if (n, wire) == (1, LEN))
    return tensors


def _tensor(view: memoryview) -> GenericTensor:
    name, dtype = "", 0
    shape: list[Array] = []
    flat: dict[int, list[Any]] = {}
    for number, wire, value in _fields(view):
        if number == 1 and wire == LEN:
            name = _text(value)
        elif number == 2 and wire == VARINT:
            dtype = signed(value, 32)
        elif number == 3 and wire in (VARINT, LEN):
            shape.append(_numbers(wire, value, _U32))
        elif number - _FLAT == GrpsDataType.DT_STRING and wire == LEN:
            flat.setdefault(GrpsDataType.DT_STRING, []).append(_text(value))
        elif number - _FLAT in WIRE_TYPES:
            kind = WIRE_TYPES[number - _FLAT]
            if _fits(wire, kind):
                flat.setdefault(number - _FLAT, []).append(_numbers(wire, value, kind))
    whole = {
        kind: pieces if kind == GrpsDataType.DT_STRING else _joined(pieces)
        for kind, pieces in flat.items()
    }
    dims = tuple(_joined(shape).tolist()) if shape else ()
    return GenericTensor(name, dtype, dims, whole)


def _fits(wire: int, kind: np.dtype[Any]) -> bool:
    single = VARINT if kind.kind in "iu" else FIXED32 if kind.itemsize == 4 else FIXED64
    return wire in (single, LEN)


def _numbers(wire: int, value: Any, kind: np.dtype[Any]) -> Array:
    """Return the numbers of one piece of a repeated field: a packed piece, or a single element."""
    if wire == VARINT:
        value = memoryview(encode_varint(value))
    if kind.kind == "f":
        if len(value) % kind.itemsize:
            raise InvalidArgument("the message ends in the middle of a number")
        return np.frombuffer(value, kind) if len(value) else np.empty(0, kind)
    numbers = varints.unpack(value)
    if numbers.dtype.itemsize < kind.itemsize:
        return numbers if numbers.dtype == np.uint8 else numbers.astype(kind)
    return numbers.astype(np.uint64).astype(f"<u{kind.itemsize}").view(kind)


def _joined(pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _map(view: memoryview, earlier: GenericMap | None) -> GenericMap:
    maps: dict[str, dict[str, Any]] = {
        name: dict(getattr(earlier, name)) if earlier else {} for name in _MAPS
    }
    for number, wire, value in _fields(view):
        if 1 <= number <= len(_MAPS) and wire == LEN:
            name = list(_MAPS)[number - 1]
            key, element = _entry(value, name)
            maps[name][key] = element
    return GenericMap(**maps)


def _entry(view: memoryview, name: str) -> tuple[str, Any]:
    wire_type, default, read, _ = _MAPS[name]
    key, element = "", default
    for number, wire, value in _fields(view):
        if number == 1 and wire == LEN:
            key = _text(value)
        elif number == 2 and wire == wire_type:
            element = read(value)
    return key, element


# name -> wire type, default, reader and writer of the value; in the order of field numbers
_MAPS: dict[str, tuple[int, Any, Callable[[Any], Any], Callable[[Any], bytes]]] = {
    "s_s": (LEN, "", _text, lambda v: v.encode()),
    "s_b": (LEN, b"", bytes, bytes),
    "s_i32": (VARINT, 0, lambda v: signed(v, 32), encode_varint),
    "s_i64": (VARINT, 0, lambda v: signed(v, 64), encode_varint),
    "s_f": (FIXED32, 0.0, lambda v: struct.unpack("<f", v)[0], lambda v: _float32(v)),
    "s_d": (FIXED64, 0.0, lambda v: struct.unpack("<d", v)[0], lambda v: struct.pack("<d", v)),
}
_PAYLOAD: dict[str, Callable[[memoryview, Any], Any]] = {
    "bin_data": lambda view, _: view,
    "str_data": lambda view, _: _text(view),
    "gtensors": _tensors,
    "ndarray": lambda view, _: _empty(view),
    "gmap": _map,
}


def _empty(view: memoryview) -> bool:
    for _ in _fields(view):
        pass
    return True


# ---------------------------------------------------------------------- writing


def encode(message: GrpsMessage) -> bytes:
    """Return the wire form in one piece."""
    return b"".join(parts(message))


def size_of(pieces: Iterable[Part]) -> int:
    """Return the total size of the parts, in bytes."""
    return sum(len(piece) for piece in pieces)


def parts(message: GrpsMessage) -> list[Part]:
    """Return the wire form in consecutive parts; large parts are not copied. Raise InvalidArgument
    if more than one payload is set, or a value cannot be written."""
    kinds = [kind for kind in KINDS if getattr(message, kind) not in (None, False)]
    if len(kinds) > 1:
        raise InvalidArgument(f"a GrpsMessage holds one of {kinds[0]} and {kinds[1]}, not both")
    out: list[Part] = []
    if message.status is not None:
        out += _nested(1, _status_parts(message.status))
    if message.model:
        out += _nested(2, [message.model.encode()])
    for kind in kinds:
        out += _nested(KINDS.index(kind) + 3, _payload(message, kind))
    return out


def _nested(number: int, pieces: list[Part]) -> list[Part]:
    return [_key(number, LEN) + encode_varint(size_of(pieces)), *pieces]


def _key(number: int, wire: int) -> bytes:
    return encode_varint(number << 3 | wire)


def _status_parts(status: GrpsStatus) -> list[Part]:
    out: list[Part] = []
    if status.code:
        out.append(_key(1, VARINT) + encode_varint(status.code))
    if status.msg:
        out += _nested(2, [status.msg.encode()])
    if status.status:
        out.append(_key(3, VARINT) + encode_varint(status.status))
    return out


def _payload(message: GrpsMessage, kind: str) -> list[Part]:
    if kind == "bin_data":
        return [memoryview(message.bin_data).cast("B")] if message.bin_data else []
    if kind == "str_data":
        return [(message.str_data or "").encode()]
    if kind == "gtensors":
        return [p for t in message.gtensors or () for p in _nested(1, _tensor_parts(t))]
    if message.gmap is not None:
        return [p for n, name in enumerate(_MAPS, 1) for p in _map_parts(n, name, message.gmap)]
    return []


def _tensor_parts(tensor: GenericTensor) -> list[Part]:
    out: list[Part] = []
    if tensor.name:
        out += _nested(1, [tensor.name.encode()])
    if tensor.dtype:
        out.append(_key(2, VARINT) + encode_varint(tensor.dtype))
    if tensor.shape:
        out += _nested(3, [b"".join(encode_varint(dim) for dim in tensor.shape)])
    for kind in sorted(tensor.flat):
        values = tensor.flat[kind]
        if kind == GrpsDataType.DT_STRING:
            for text in values:
                out += _nested(kind + _FLAT, [text.encode()])
        elif len(values):
            out += _nested(kind + _FLAT, [_packed(kind, np.asarray(values))])
    return out


def _packed(kind: int, values: Array) -> memoryview:
    wire = WIRE_TYPES[kind]
    if wire.kind == "f":
        return np.ascontiguousarray(values, wire).reshape(-1).view(np.uint8).data
    return np.ascontiguousarray(varints.pack(values)).data


def _map_parts(number: int, name: str, maps: GenericMap) -> list[Part]:
    wire, _, _, write = _MAPS[name]
    values: Mapping[str, Any] = getattr(maps, name)
    out: list[Part] = []
    for key, value in values.items():
        entry = _nested(1, [key.encode()])
        written = write(value)
        entry += _nested(2, [written]) if wire == LEN else [_key(2, wire) + written]
        out += _nested(number, entry)
    return out


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        raise InvalidArgument(f"gmap: s_f cannot hold {value}") from None
