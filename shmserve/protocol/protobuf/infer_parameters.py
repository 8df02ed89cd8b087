"""Maps of InferParameter in requests, tensors and responses: reading and writing."""

import struct
from collections.abc import Mapping

from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.protobuf.wire import Malformed, Walk, encode_field, encode_varint, signed

_DOUBLE = struct.Struct("<d")


class Uint64(int):
    """Value of a uint64_param, a type that only some parameters accept. The Python type tells the
    other fields apart: bool, int (int64_param), str and float."""


def add_parameter(
    walk: Walk, start: int, stop: int, parameters: dict[str, Parameter], limit: int
) -> None:
    """Add an entry of a parameters map. A repeated key replaces the earlier entry. Raise
    InvalidArgument for a malformed entry, an entry without a value, or more than `limit`
    entries."""
    key = ""
    value: Parameter | None = None
    for tag, first, end in walk.fields(start, stop):
        if tag == 0x0A:
            key = walk.text(first, end, "the key of a parameter")
        elif tag == 0x12:
            merged = _value(walk, first, end)
            value = value if merged is None else merged
        else:  # protobuf implementations disagree whether to keep such an entry
            raise Malformed(f"a parameter's entry has the unknown field {tag >> 3}")
    if value is None:
        raise InvalidArgument(f"parameter '{key}' has no value of a known type")
    parameters[key] = value
    if len(parameters) > limit:
        raise InvalidArgument(f"there are more than {limit} parameters")


def _value(walk: Walk, start: int, stop: int) -> Parameter | None:
    """Return the value of an InferParameter. The last field counts."""
    value: Parameter | None = None
    for tag, first, end in walk.fields(start, stop):
        if tag == 0x10:
            value = signed(walk.varint(first))
        elif tag == 0x1A:
            value = walk.text(first, end, "the value of a parameter")
        elif tag == 0x08:
            value = walk.varint(first) != 0
        elif tag == 0x28:
            value = Uint64(walk.varint(first))
        elif tag == 0x21:
            (value,) = _DOUBLE.unpack_from(walk.data, first)
    return value


def encode_parameters(tag: int, parameters: Mapping[str, Parameter]) -> bytes:
    """Return the encoded entries of a parameters map, each under `tag`."""
    fields = [
        encode_field(0x0A, key.encode()) + encode_field(0x12, _encoded(value))
        for key, value in parameters.items()
    ]
    return b"".join([encode_field(tag, entry) for entry in fields])


def _encoded(value: Parameter) -> bytes:
    """Return an InferParameter, encoded as its single field."""
    if isinstance(value, bool):
        return b"\x08\x01" if value else b"\x08\x00"
    if isinstance(value, str):
        return encode_field(0x1A, value.encode())
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    if isinstance(value, Uint64) or value >= 1 << 63:
        return b"\x28" + encode_varint(value)
    return b"\x10" + encode_varint(value)
